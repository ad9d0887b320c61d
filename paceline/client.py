"""HTTP requests that commands send to a gateway."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

from paceline.core.errors import ConfigError, InvalidRequestError, UnavailableError

SECONDS = 5.0
"""Default deadline of each network operation, in seconds."""


@dataclass(frozen=True, slots=True)
class GatewayClient:
    """A client that sends HTTP requests to one gateway, with an API key if there is one."""

    url: str
    """URL of the gateway: http://…, https://… or unix:PATH."""
    api_key: str = ""
    ca_certs: str = ""
    """PEM file with the certificates of the authorities to trust; "" for the authorities of the system or
    $SSL_CERT_FILE.
    """
    model: str = ""
    """The model whose fleet `fetch_fleet` asks about; "" for all models, or if the gateway has one."""

    def fetch_fleet(
        self, path: str, body: Mapping[str, object] | None = None, seconds: float = SECONDS
    ) -> dict[str, Any]:
        """Return the JSON object at `path` for the fleet of `model`. Arguments and errors are those of `fetch`."""
        if self.model and body is None:
            path += f"{'&' if '?' in path else '?'}{urllib.parse.urlencode({'model': self.model})}"
        elif self.model and body is not None:
            body = {"model": self.model, **body}
        return self.fetch(path, body, seconds)

    def fetch(self, path: str, body: Mapping[str, object] | None = None, seconds: float = SECONDS) -> dict[str, Any]:
        """Return the JSON object at `path` of the gateway.

        Args:
            body: sent with POST; without a body the request is a GET.
            seconds: deadline of each network operation of the request.

        Raises the errors of `send`. Also raises UnavailableError if the answer is not a JSON object.
        """
        if body is None:
            answer = self.send("GET", path, seconds=seconds)
        else:
            headers = {"Content-Type": "application/json"}
            answer = self.send("POST", path, json.dumps(body).encode(), headers, seconds)
        try:
            found = json.loads(answer)
            if not isinstance(found, dict):
                raise ValueError("its answer is not a JSON object")
        except ValueError as error:
            raise self._unavailable(error) from error
        return found

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = SECONDS,
    ) -> bytes:
        """Send a request and return the body of its answer.

        Args:
            seconds: deadline of each network operation of the request.

        Raises:
            ConfigError: the file of `ca_certs` cannot be used.
            InvalidRequestError: the gateway refuses. The message is the gateway's, if it gave one.
            UnavailableError: no gateway answers at `url`.
        """
        with self._open(method, path, body, headers, seconds) as response:
            return bytes(response.read())

    def stream(self, path: str, body: Mapping[str, object], seconds: float = SECONDS) -> Iterator[bytes]:
        """Send a request and yield the lines of its answer as they come.

        Args:
            body: JSON, sent with POST.
            seconds: deadline of each network operation; it also limits the time between two lines.

        Raises the errors of `send`.
        """
        headers = {"Content-Type": "application/json"}
        with self._open("POST", path, json.dumps(body).encode(), headers, seconds) as response:
            yield from response

    @contextlib.contextmanager
    def _open(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None, seconds: float
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield its open answer. Raises the errors of `send`, also if reading the answer fails."""
        url = self.url
        handlers: list[urllib.request.BaseHandler] = [_Redirects()] if self.api_key else []
        if url.startswith("https://"):
            handlers.append(urllib.request.HTTPSHandler(context=self._tls()))
        elif url.startswith("unix:"):
            no_proxy = urllib.request.ProxyHandler({})
            handlers += [_UnixHandler(url.removeprefix("unix:")), no_proxy]
            url = "http://localhost"
        try:
            if not url.startswith(("http://", "https://")):
                raise ValueError("not an http URL")
            request = urllib.request.Request(f"{url.rstrip('/')}{path}", body, dict(headers or {}), method=method)
            if self.api_key:
                request.add_header("Authorization", f"Bearer {self.api_key}")
            with urllib.request.build_opener(*handlers).open(request, timeout=seconds) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise InvalidRequestError(f"{self.url} answers {error.code}: {_reason(error)}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> UnavailableError:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        advice = "name it with --url"
        if isinstance(reason, ssl.SSLCertVerificationError):
            advice = "name the authority of its certificate with --ssl-ca-certs, and with --url a name that it has"
        return UnavailableError(f"no gateway at {self.url} ({reason}); {advice}")

    def _tls(self) -> ssl.SSLContext:
        try:
            return ssl.create_default_context(cafile=self.ca_certs or None)
        except OSError as error:
            raise ConfigError(f"--ssl-ca-certs {self.ca_certs} holds no PEM certificates: {error}") from error


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A handler that follows redirects only within the gateway's origin, because the API key goes with the request.

    Clients without an API key follow all redirects.
    """

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if _origin(newurl) != _origin(req.full_url):
            raise urllib.error.URLError(f"it redirects to {_origin(newurl)}, which would get the API key")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _origin(url: str) -> str:
    """Return the scheme, host and port of a URL. The default port of the scheme is left out."""
    parts = urllib.parse.urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    is_default = parts.port in (None, {"http": 80, "https": 443}.get(parts.scheme))
    return f"{parts.scheme}://{host}" if is_default else f"{parts.scheme}://{host}:{parts.port}"


class _UnixHandler(urllib.request.HTTPHandler):
    """A handler that sends all requests to the Unix socket at `path`, whatever their host is."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(lambda host, **options: _UnixConnection(self._path, **options), request)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, **options: Any) -> None:
        super().__init__("localhost", **options)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        with error:
            return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return error.reason
