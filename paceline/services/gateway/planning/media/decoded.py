"""The common part of the decoders of images, videos and audio."""

from __future__ import annotations


class BrokenItemError(Exception):
    """An item cannot be decoded. The message says what is wrong with it and what to do."""


def check_not_text(data: memoryview, kind: str) -> None:
    """Raise BrokenItemError if data is a text, such as the page that a server sends instead of a file."""
    begin = bytes(data[:512]).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not begin:
        raise BrokenItemError("the file is empty")
    if begin.startswith(b"<svg") or (begin.startswith(b"<?xml") and b"<svg" in begin):
        raise BrokenItemError("SVG images are not supported; send a PNG, JPEG, WebP, GIF or BMP file")
    if begin.startswith((b"<!doctype html", b"<html", b"<?xml")):
        raise BrokenItemError(f"this is a web page and not {kind}; send the URL of the file itself")
