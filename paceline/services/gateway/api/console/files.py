"""The files of the console's page, read once and held in memory."""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.util
import logging
import mimetypes
from collections.abc import Iterator, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
"""Folder of the console's own files."""
_CHART_PACKAGE = "youplot"
"""A package whose wheel carries uPlot. It is never imported."""
_CHART_FILES = {
    "uplot.iife.min.js": "2d27e8ad3d228164525ce213f9dc716f39b4e3aee0cc773fb3491c96cf4921a2",
    "uplot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""Names of the chart library's files, with their SHA-256 in uPlot's release 1.6.31. Other files are not served."""
_LEAST_COMPRESSED = 500
"""Size in bytes below which compression is not worth its header."""

PAGE = "index.html"

HEADERS = {
    # A browser asks each time, and gets 304 if nothing has changed. So no old file is used after an upgrade.
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
        "media-src 'self' data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "vary": "accept-encoding",
}

log = logging.getLogger(__name__)


class StaticFile:
    """One file, with its ETag. The file is compressed when a client first accepts compression."""

    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        self._tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        self._media_type = mimetypes.guess_type(name)[0] or "text/plain"

    @functools.cached_property
    def _packed(self) -> bytes | None:
        """The compressed content; None if the file is too small to compress."""
        packed = gzip.compress(self._content, mtime=0) if len(self._content) >= _LEAST_COMPRESSED else self._content
        return packed if len(packed) < len(self._content) else None

    def response(self, request: Request) -> Response:
        """Return the file, compressed if the client accepts this, or status 304 if the client has the file already."""
        headers = {**HEADERS, "etag": self._tag}
        if self._tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", "") and self._packed is not None:
            return Response(self._packed, headers={**headers, "content-encoding": "gzip"}, media_type=self._media_type)
        return Response(self._content, headers=headers, media_type=self._media_type)


def read_files() -> Mapping[str, StaticFile]:
    """Read all files of the console and return them by name. Without the chart library, the console shows no charts."""
    own = ((path.name, path.read_bytes()) for path in sorted(STATIC.iterdir()) if path.is_file())
    return {name: StaticFile(name, content) for name, content in (*own, *chart_files())}


def chart_files() -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file of the chart library; nothing if the right package is not installed."""
    found = importlib.util.find_spec(_CHART_PACKAGE)  # finds it without running its code
    folders = [] if found is None else list(found.submodule_search_locations or ())
    for name, digest in _CHART_FILES.items():
        content = next((path.read_bytes() for each in folders if (path := Path(each, "vendor", name)).is_file()), b"")
        if hashlib.sha256(content).hexdigest() == digest:
            yield name, content
        else:
            log.warning("the console shows no charts: install %s==1.0.0, which has uPlot 1.6.31", _CHART_PACKAGE)
