"""The first requests to a stack: a health check, and a command for the user to paste."""

from __future__ import annotations

import asyncio
import json
import shlex
import ssl
import urllib.parse
from collections.abc import Iterable, Sequence
from pathlib import Path

from redis.exceptions import RedisError

from paceline.core import env
from paceline.core.config import ServeConfig
from paceline.core.errors import UnavailableError
from paceline.core.pooling_config import PoolingConfig
from paceline.core.pooling_folder import read_pooling_config
from paceline.services.common.member_signatures import MemberSignatures
from paceline.services.common.registry import connect, read_members
from paceline.services.common.secret import Secret
from paceline.services.serve.settings import served_name

SERVING_SECONDS = 30.0
"""Longest time for the gateway to find the workers, which are ready already, in seconds."""


async def wait_until_serving(config: ServeConfig, address: str, models: Sequence[str]) -> None:
    """Wait until the gateway reports that it can place requests. Raises UnavailableError after SERVING_SECONDS.

    Args:
        address: host:port or unix:PATH, as the gateway announced it.
        models: names of the models, all of which must be served.
    """
    if config.ssl_cert_reqs == ssl.CERT_REQUIRED:
        return  # the gateway demands client certificates, and this process has none
    try:
        async with asyncio.timeout(SERVING_SECONDS):
            while True:
                if all([await _is_healthy(config, address, model) for model in models]):
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise UnavailableError("the gateway finds no worker although all are ready; see the log above") from None


async def numerics_in_use(redis: str, clusters: Iterable[str], secret: Secret) -> list[str]:
    """Return the numerics that workers of the clusters use, each numerics once; [] if Redis does not answer."""
    client = connect(redis)
    try:
        members = [
            member for each in clusters for member in await read_members(client, each, MemberSignatures(secret, each))
        ]
    except (RedisError, OSError):
        return []
    finally:
        await client.aclose()
    return sorted({str(member.numerics) for member in members if member.numerics is not None})


def first_request(
    config: ServeConfig, model: Path, address: str, numerics: Sequence[str] = (), models: Sequence[str] = ()
) -> str:
    """Return a curl command that gets an answer from the stack.

    Args:
        config: the options of the model to try.
        model: the model's folder; if it has a chat template, the request is a chat.
        address: host:port or unix:PATH, as the gateway announced it.
        numerics: the numerics of the workers, for the user to read.
        models: names of all models.
    """
    body: dict[str, object] = {"model": served_name(config), "max_tokens": 64}
    pooling = read_pooling_config(model)
    if pooling is not None:
        path, body = _first_pooling(pooling, served_name(config))
    elif config.chat_template or _has_chat_template(model):
        path = "v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "Why is the sky blue?"}]
    else:
        path = "v1/completions"
        body["prompt"] = "The sky is blue because"
    lines = [
        f"{_curl(config, address)}/{path} -H 'Content-Type: application/json'",
        *_certificate_lines(config),
        *_key_lines(config),
    ]
    lines.append(f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}")
    request = " \\\n    ".join(lines)
    computing = f" Workers compute with {' and '.join(numerics)}." if numerics else ""
    named = f" The models are {' and '.join(models)}." if len(models) > 1 else ""
    return f"\nReady.{named}{computing} Try it:\n\n  {request}\n\nCtrl-C stops.\n"


def _first_pooling(pooling: PoolingConfig, name: str) -> tuple[str, dict[str, object]]:
    """Return the path and the body of a request for a task of the model."""
    if "embed" in pooling.tasks:
        return "v1/embeddings", {"model": name, "input": ["Why is the sky blue?", "A cat sleeps."]}
    if "score" in pooling.tasks:
        documents = ["Air scatters blue light.", "Cats sleep."]
        return "v1/rerank", {"model": name, "query": "Why is the sky blue?", "documents": documents}
    return "pooling", {"model": name, "input": "Why is the sky blue?"}


def _curl(config: ServeConfig, address: str) -> str:
    """Return the beginning of a curl command, up to the host."""
    scheme = "https" if config.ssl_certfile else "http"
    if config.uds:
        return f"curl --unix-socket {shlex.quote(address.removeprefix('unix:'))} {scheme}://localhost"
    host, port = _local(config.host), address.rpartition(":")[2]
    return f"curl {scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _certificate_lines(config: ServeConfig) -> list[str]:
    # The certificate is for the name by which clients reach the server, which need not be this address.
    trusted = [f"--cacert {shlex.quote(config.ssl_certfile)}"] if config.ssl_certfile else []
    required = config.ssl_cert_reqs == ssl.CERT_REQUIRED
    return [*trusted, *(["--cert YOUR_CERTIFICATE --key YOUR_KEY_FILE"] if required else [])]


def _key_lines(config: ServeConfig) -> list[str]:
    # A key is never printed, because output ends up in logs.
    if config.api_key or config.api_keys_file:
        return ["-H 'Authorization: Bearer YOUR_KEY'"]
    return ['-H "Authorization: Bearer ${PACELINE_API_KEY%%,*}"'] if env.api_keys() else []


def _has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").exists() or (model / "chat_template.json").exists():
        return True
    try:
        return "chat_template" in json.loads((model / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False


def _local(host: str) -> str:
    """Return an address by which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


async def _is_healthy(config: ServeConfig, address: str, model: str) -> bool:
    # The certificate may name another host. A health check of our own child does not need to verify it.
    tls = ssl._create_unverified_context() if config.ssl_certfile else None
    try:
        if config.uds:
            path = address.removeprefix("unix:")
            reader, writer = await asyncio.open_unix_connection(path, ssl=tls, server_hostname="" if tls else None)
        else:
            port = int(address.rpartition(":")[2])
            reader, writer = await asyncio.open_connection(_local(config.host), port, ssl=tls)
    except OSError:
        return False
    try:
        path = f"/health?model={urllib.parse.quote(model, safe='')}"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()
