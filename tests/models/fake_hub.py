"""A small Hugging Face hub, which speaks the part of the hub's protocol that downloads use."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """A model's repository with one commit, which the branch main and the tag v1 point to."""

    files: dict[str, bytes]
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that the hub claims, where they are not those of `files`."""
    is_gated: bool = False
    """Whether files are refused to users without TOKEN. Names of files can be read by everybody."""
    cuts: dict[str, int] = field(default_factory=dict)
    """Bytes of a file after which its connection breaks once."""
    stalled: str = ""
    """A file of which only the first half is sent; then the connection stays open."""


@dataclass
class FakeHub:
    """The hub's state, which a test changes, and the requests that it got."""

    url: str = ""
    token: str = "hf_secretsecretsecret"
    repositories: dict[str, Repository] = field(default_factory=dict)
    status: int = 0
    """Status of every answer; 0 if the hub works."""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range of each request."""
    tokens: set[str] = field(default_factory=set)
    """Values of the header Authorization."""
    stalls: threading.Event = field(default_factory=threading.Event)
    """Set when a file has stalled."""
    ends: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, folder: Path, **options: object) -> Repository:
        """Add a repository with the files of a folder."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repositories[name] = Repository(files, **options)  # type: ignore[arg-type]
        return self.repositories[name]

    def fetched(self) -> list[str]:
        """Return the names of the files whose content was sent, each time that it was."""
        mark = f"/resolve/{COMMIT}/"
        return [path.partition(mark)[2] for method, path, _ in self.requests if method == "GET" and mark in path]


@contextmanager
def serve_hub(host: str = "127.0.0.1", port: int = 0) -> Iterator[FakeHub]:
    """Run a hub without repositories. By default it has a free port of loopback."""
    hub = FakeHub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    hub.url = f"http://{host}:{server.server_port}"
    try:
        yield hub
    finally:
        hub.ends.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.state
        hub.requests.append((self.command, self.path, self.headers.get("Range", "")))
        if authorization := self.headers.get("Authorization"):
            hub.tokens.add(authorization)
        if hub.status:
            return self._send(hub.status)
        if authorization not in (None, f"Bearer {hub.token}"):
            return self._send(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        match = re.match(
            r"(?P<api>/api/models)?/(?P<name>[^/]+/[^/]+)(/(revision|tree|resolve)/(?P<revision>[^/?]+))?(/(?P<file>[^?]*))?",
            self.path,
        )
        repository = hub.repositories.get(match["name"]) if match else None
        if match is None or repository is None:
            return self._send(401 if authorization is None else 404, {"X-Error-Code": "RepoNotFound"})
        if match["revision"] not in (None, "main", "v1", COMMIT):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        if not match["api"]:
            return self._send_file(repository, match["file"], is_known=authorization is not None)
        if "/tree/" in self.path:
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
                for name, content in repository.files.items()
            ]
            return self._send(200, body=json.dumps(entries).encode())
        siblings = [{"rfilename": name} for name in repository.files]
        return self._send(200, body=json.dumps({"id": match["name"], "sha": COMMIT, "siblings": siblings}).encode())

    def _send_file(self, repository: Repository, name: str, is_known: bool) -> None:
        content = repository.files.get(name)
        if repository.is_gated and not is_known:
            return self._send(401, {"X-Error-Code": "GatedRepo"})
        if content is None:
            return self._send(404, {"X-Error-Code": "EntryNotFound"})
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            size = repository.sizes.get(name, len(content))
            return self._send(200, {**headers, "Content-Length": str(size)})
        start = int(self.headers.get("Range", "bytes=0-")[len("bytes=") :].partition("-")[0])
        if "Range" in self.headers:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        status = 206 if "Range" in self.headers else 200
        if cut := repository.cuts.pop(name, 0):
            self._send(status, {**headers, "Content-Length": str(len(content) - start)}, content[start : start + cut])
            self.close_connection = True
            return None
        if name == repository.stalled:
            self._send(status, {**headers, "Content-Length": str(len(content))}, content[: len(content) // 2])
            self.state.stalls.set()
            self.state.ends.wait()
            self.close_connection = True
            return None
        return self._send(status, headers, content[start:])

    def _send(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
