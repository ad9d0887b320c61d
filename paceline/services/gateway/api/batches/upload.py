"""Reads the multipart body of an upload piece by piece. The file's bytes are passed on and never kept."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from paceline.services.gateway.http.errors import ApiError

MAX_FIELD_BYTES = 1024
"""Largest size of the value of a field that is no file, in bytes."""
MAX_HEADER_BYTES = 8 << 10
"""Largest size of the headers of one part, in bytes."""
MAX_PARTS = 16
MAX_NAME_CHARACTERS = 255


class Upload:
    """The reader of one upload's body. All methods raise ApiError if the body is not valid.

    Args:
        content_type: the header Content-Type.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(400, "an upload needs the header Content-Type: multipart/form-data; boundary=…")
        self.fields: dict[str, str] = {}
        """Values of the fields read so far, by name, without the file."""
        self.filename: str | None = None
        """Name of the file; None if its part has not begun."""
        self._headers: dict[bytes, bytes] = {}
        self._header = [b"", b""]
        self._header_bytes = 0
        """Size of the headers read so far of the present part, in bytes."""
        self._name = ""
        self._value = bytearray()
        self._parts = 0
        self._in_file = False
        self._is_complete = False
        self._content: list[bytes] = []
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
                    "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": lambda data, start, end: self._add_data(data[start:end]),
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _invalid(str(error)) from error

    def feed(self, data: bytes) -> list[bytes]:
        """Read a piece of the body and return the bytes in it that belong to the file."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _invalid(str(error)) from error
        content, self._content = self._content, []
        return content

    def finish(self) -> None:
        """Check that the body is complete and has a file."""
        if not self._is_complete:
            raise _invalid("its last boundary is missing")
        if self.filename is None:
            raise ApiError(400, "file: the body has no part with this name and a file name", param="file")

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _invalid(f"it has more than {MAX_PARTS} parts")
        self._headers, self._in_file = {}, False
        self._header_bytes = 0
        self._value.clear()

    def _add_header(self, index: int, data: bytes) -> None:
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise _invalid(f"the headers of a part have more than {MAX_HEADER_BYTES} bytes")
        self._header[index] += data

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file" and b"filename" in options:
            if self.filename is not None:
                raise _invalid("it has two files")
            name = options[b"filename"].decode("utf-8", "replace")
            self.filename, self._in_file = name[:MAX_NAME_CHARACTERS], True

    def _add_data(self, data: bytes) -> None:
        if self._in_file:
            self._content.append(data)
            return
        self._value += data
        if len(self._value) > MAX_FIELD_BYTES:
            raise _invalid(f"the field {self._name[:80]!r} has more than {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if not self._in_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_complete = True


def _invalid(reason: str) -> ApiError:
    return ApiError(400, f"the body is not valid multipart/form-data: {reason}")
