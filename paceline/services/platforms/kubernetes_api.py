"""A small client of the Kubernetes API: the objects of one namespace, merge patches and watches.

The planner needs no more of the API than this, so httpx is enough. Errors of the API become UnavailableError, because
the planner tries again later.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from paceline.core import env
from paceline.core.errors import ConfigError, UnavailableError

Json = dict[str, Any]

CALL_SECONDS = 10.0
"""Deadline of a call to the API, in seconds."""
WATCH_SECONDS = 60
"""Seconds after which the API server ends a watch. A dead connection is noticed soon after this time."""
PAGE = 500
"""Largest number of objects in one answer to a list request."""
ATTEMPTS = 5
"""Largest number of attempts at a change that conflicts with changes by others."""

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder with the files that a pod gets for its service account."""


class ObjectConflictError(UnavailableError):
    """Somebody has changed the object since it was read (409). Read it again."""


class GoneError(UnavailableError):
    """The API server does not keep changes since this version any more (410). List again."""


class MissingError(UnavailableError):
    """The requested object does not exist (404)."""


class KubernetesApi:
    """The API of one namespace.

    Args:
        url: the API server, such as https://10.0.0.1:443.
        token_file: file with the service account's token, which is read for every call because it is renewed; None to
            send no token.
        authorities: PEM file with the authorities of the API server; "" for the authorities of the system.
    """

    def __init__(self, url: str, namespace: str, token_file: Path | None = None, authorities: str = "") -> None:
        self.namespace = namespace
        self._token_file = token_file
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=CALL_SECONDS,
            verify=ssl.create_default_context(cafile=authorities or None),
            trust_env=False,  # a proxy for the internet does not reach the API server
        )

    @classmethod
    def in_cluster(cls) -> KubernetesApi:
        """Return the API of this pod's namespace, with the rights of its service account. Raises ConfigError."""
        address = env.kubernetes_api()
        try:
            namespace = (_ACCOUNT / "namespace").read_text().strip()
        except OSError:
            address = None
        if address is None:
            raise ConfigError("the platform kubernetes works only in a pod with the token of a service account")
        return cls(f"https://{address}", namespace, _ACCOUNT / "token", str(_ACCOUNT / "ca.crt"))

    async def get(self, path: str) -> Json:
        """Return the object at a path. Raises UnavailableError.

        Args:
            path: path within the namespace, such as apps/v1/deployments/worker or v1/pods/worker-1.
        """
        return await self._call("GET", path)

    async def patch(self, path: str, body: Json) -> Json:
        """Change an object by a merge patch, and return the new object. Raises UnavailableError.

        A `metadata.resourceVersion` in `body` is a condition: the call raises ObjectConflictError if the object has
        another version.
        """
        headers = {"Content-Type": "application/merge-patch+json"}
        return await self._call("PATCH", path, headers=headers, content=json.dumps(body))

    async def change(self, path: str, make: Callable[[Json], Json | None]) -> None:
        """Read an object and change it. Begin anew if somebody else has changed the object meanwhile.

        Args:
            make: returns the merge patch for the object as it is now; None if nothing is to be done. Its errors reach
                the caller.

        Raises UnavailableError, also if others keep changing the object.
        """
        for attempt in range(ATTEMPTS):
            found = await self.get(path)
            body = make(found)
            if body is None:
                return
            version = found["metadata"]["resourceVersion"]
            metadata = {**body.get("metadata", {}), "resourceVersion": version}
            try:
                await self.patch(path, {**body, "metadata": metadata})
                return
            except ObjectConflictError:
                await asyncio.sleep(random.uniform(0, 0.02 * 2**attempt))
        raise UnavailableError(f"others keep changing {path}; is there an autoscaler besides the planner?")

    async def list(self, path: str, labels: str) -> tuple[list[Json], str]:
        """Return all objects with these labels and the version of the list, for `watch`. Raises UnavailableError."""
        items: list[Json] = []
        query = {"labelSelector": labels, "limit": str(PAGE)}
        while True:
            page = await self._call("GET", path, params=query)
            items += page["items"]
            query["continue"] = page["metadata"].get("continue", "")
            if not query["continue"]:
                return items, str(page["metadata"]["resourceVersion"])

    async def watch(self, path: str, labels: str, version: str) -> AsyncIterator[tuple[str, Json]]:
        """Yield changes after `version` until the API server ends the watch.

        A change is ADDED, MODIFIED, DELETED or BOOKMARK, with the object. A bookmark has only a newer version. The
        first bookmark is made by this client, and has the old version. It shows that the API server has accepted the
        watch.

        Raises GoneError if the version is too old, and UnavailableError if the connection breaks.
        """
        query = {
            "labelSelector": labels,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = httpx.Timeout(CALL_SECONDS, read=WATCH_SECONDS + CALL_SECONDS)
        request = self._client.build_request(
            "GET", self._path(path), params=query, headers=self._headers(), timeout=timeout
        )
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.is_error:
                    await response.aread()
                    raise _error(path, response.status_code, response.text)
                yield "BOOKMARK", {"metadata": {"resourceVersion": version}}
                async for line in response.aiter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _error(path, event["object"].get("code", 500), json.dumps(event["object"]))
                    yield event["type"], event["object"]
            finally:
                await response.aclose()
        except (httpx.HTTPError, ValueError) as error:  # ValueError: the connection broke in the middle of a line
            raise UnavailableError(f"the watch of {path} broke: {error!r}") from error

    async def close(self) -> None:
        """Close all connections to the API server."""
        await self._client.aclose()

    async def _call(self, method: str, path: str, headers: Mapping[str, str] | None = None, **rest: Any) -> Json:
        try:
            answer = await self._client.request(
                method, self._path(path), headers={**self._headers(), **(headers or {})}, **rest
            )
            if answer.is_error:
                raise _error(path, answer.status_code, answer.text)
            return dict(answer.json())
        except (httpx.HTTPError, ValueError) as error:
            raise UnavailableError(f"the API server does not answer: {error!r}") from error

    def _path(self, path: str) -> str:
        """Return the whole path of GROUP/VERSION/RESOURCE… in the namespace. The core group has no name: v1/pods."""
        group, _, rest = path.partition("/")
        if group != "v1":
            version, _, rest = rest.partition("/")
            return f"/apis/{group}/{version}/namespaces/{self.namespace}/{rest}"
        return f"/api/v1/namespaces/{self.namespace}/{rest}"

    def _headers(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self._token_file.read_text().strip()}"}
        except OSError as error:
            raise UnavailableError(f"cannot read the token {self._token_file}: {error.strerror}") from error


def _error(path: str, code: int, text: str) -> UnavailableError:
    """Return the error for an answer of the API server, with the server's own words."""
    try:
        words = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        words = text[:200]
    if code == 409:
        return ObjectConflictError(f"{path} has changed meanwhile: {words}")
    if code == 410:
        return GoneError(f"changes of {path} are not kept for so long: {words}")
    if code == 404:
        return MissingError(f"there is no {path}: kubectl apply -k kubernetes/base")
    if code in (401, 403):
        return UnavailableError(
            f"the planner may not use {path}; its Role is in kubernetes/fleet/planner.yaml: {words}"
        )
    return UnavailableError(f"the API server answers {code} for {path}: {words}")
