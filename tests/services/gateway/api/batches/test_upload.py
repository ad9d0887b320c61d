"""Multipart bodies, read piece by piece."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.api.batches.upload import MAX_FIELD_BYTES, MAX_HEADER_BYTES, MAX_PARTS, Upload
from paceline.services.gateway.http.errors import ApiError

TYPE = "multipart/form-data; boundary=cut"


def part(name: str, data: bytes, filename: str = "") -> bytes:
    named = f'; filename="{filename}"' if filename else ""
    return f'--cut\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'.encode() + data + b"\r\n"


def read(body: bytes, size: int = 1000) -> tuple[Upload, bytes]:
    upload = Upload(TYPE)
    content = b"".join(b"".join(upload.feed(body[start : start + size])) for start in range(0, len(body), size))
    upload.finish()
    return upload, content


@given(st.binary(max_size=200), st.integers(1, 40), st.booleans())
def test_the_file_does_not_depend_on_how_the_body_is_cut(data: bytes, size: int, first: bool) -> None:
    data = data.replace(b"--cut", b"")
    parts = [part("purpose", b"batch"), part("file", data, "a.jsonl")]
    upload, content = read(b"".join(parts if first else parts[::-1]) + b"--cut--\r\n", size)
    assert (upload.filename, upload.fields, content) == ("a.jsonl", {"purpose": "batch"}, data)


@given(st.binary(max_size=100))
def test_any_other_body_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError):
        read(body)


@pytest.mark.parametrize(
    "body",
    [
        part("file", b"x", "a"),
        part("purpose", b"batch") + b"--cut--\r\n",
        part("purpose", b"x" * (MAX_FIELD_BYTES + 1)) + part("file", b"x", "a") + b"--cut--\r\n",
        part("file", b"x", "a") * 2 + b"--cut--\r\n",
        part("purpose", b"batch") * (MAX_PARTS + 1) + b"--cut--\r\n",
        part("file", b"x", "a" * MAX_HEADER_BYTES) + b"--cut--\r\n",
        part("file", b"x", 'a"' + "\r\nx: y" * (MAX_HEADER_BYTES // 2)) + b"--cut--\r\n",
    ],
    ids=["no end", "no file", "long field", "two files", "many parts", "long header", "many headers"],
)
def test_what_is_wrong_is_said(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", f"multipart/form-data; boundary={'x' * 300}"],
)
def test_other_content_types_are_refused(content_type: str) -> None:
    with pytest.raises(ApiError):
        Upload(content_type)
