"""How vectors and numbers of labels are written into answers: JSON, base64 and plain bytes, in several types.

JSON is written in pieces: no other thread runs while the library writes one, and an answer may have millions of
numbers.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic_core import to_json

from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.request_scope import aside
from paceline.services.gateway.planning.request_body import Body

Json = dict[str, Any]
Values: TypeAlias = NDArray[np.float32]
EmbedDType: TypeAlias = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]

SMALL_VALUES = 10_000
"""Largest number of values of an answer that is written on the event loop. Writing them takes about a millisecond."""
_PIECE_VALUES = 9 << 10
"""Number of values that are written at once, in about a millisecond. It is a multiple of three, so that the base64 of
pieces is that of the whole."""
MOST_DESCRIBED = 256
"""Largest number of results whose shapes fit into a header, because clients refuse headers of more than 64 KiB."""


class EncodingFields(Body):
    """The fields that say how results are written."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    """float: lists of numbers. base64: the bytes of the numbers as text. bytes: the body of the answer is the bytes of
    all results, and its header `metadata` has their places. bytes_only: the same without the header."""
    embed_dtype: EmbedDType = "float32"
    """Type of the numbers in base64 and bytes."""
    endianness: Literal["native", "big", "little"] = "native"
    """Order of the bytes of a number. Native is little."""

    def check_count(self, count: int) -> None:
        """Raise ApiError if the answer to this many inputs cannot be written in the wanted format."""
        if self.encoding_format == "bytes" and count > MOST_DESCRIBED:
            message = (
                f"encoding_format bytes describes each result in a header, which has room for {MOST_DESCRIBED} results "
                f"and not for {count}; send fewer inputs, or encoding_format bytes_only"
            )
            raise ApiError(400, message, param="encoding_format")


def to_bytes(values: Values, dtype: EmbedDType = "float32", endianness: str = "native") -> bytes:
    """Return numbers as bytes in C order.

    Numbers are rounded to the nearest number of the type, ties to even. Numbers that are too large for the type become
    its largest number.
    """
    order = ">" if endianness == "big" else "<"
    match dtype:
        case "float32":
            return values.astype(f"{order}f4").tobytes()
        case "float16":
            most = np.finfo(np.float16).max
            return np.clip(values, -most, most).astype(f"{order}f2").tobytes()
        case "bfloat16":
            bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
            # Half of the last bit that stays, and one less if this bit is 0, so that ties go to even.
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return rounded.astype(f"{order}u2").tobytes()
        case "fp8_e4m3":
            return _fp8(values, _E4M3)
        case "fp8_e5m2":
            return _fp8(values, _E5M2)


def _fp8_numbers(exponent_bits: int, codes: int) -> NDArray[np.float32]:
    """Return the numbers that the codes from 0 of an 8-bit type stand for, which grow with the code."""
    mantissa_bits, bias = 7 - exponent_bits, (1 << (exponent_bits - 1)) - 1
    code = np.arange(codes)
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    numbers = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return numbers.astype(np.float32)


# Codes after these stand for infinity and for what is no number.
_E4M3 = _fp8_numbers(4, 0x7F)
_E5M2 = _fp8_numbers(5, 0x7C)


def _fp8(values: Values, numbers: NDArray[np.float32]) -> bytes:
    middles = (numbers[1:] + numbers[:-1]) / 2
    sizes = np.abs(values)
    codes = np.searchsorted(middles, sizes)
    is_tie = middles[np.minimum(codes, len(middles) - 1)] == sizes
    codes = np.minimum(codes + (is_tie & (codes % 2 == 1)), len(numbers) - 1)
    written = (codes + 128 * np.signbit(values)).astype(np.uint8)
    return bytes(written)


def value_json(values: Values, fields: EncodingFields) -> bytes:
    """Return one result as JSON: numbers, or their bytes as base64."""
    if fields.encoding_format == "base64":
        return base64_json(to_bytes(values, fields.embed_dtype, fields.endianness))
    return numbers_json(values)


def numbers_json(values: NDArray[Any]) -> bytes:
    """Return numbers as JSON: a list, or a list of lists if they have rows."""
    if values.ndim > 1:
        return json_list(map(numbers_json, values))
    if len(values) <= _PIECE_VALUES:
        return to_json(values.tolist())
    begins = range(0, len(values), _PIECE_VALUES)
    return json_list(to_json(values[begin : begin + _PIECE_VALUES].tolist())[1:-1] for begin in begins)


def base64_json(data: bytes) -> bytes:
    """Return bytes as base64 in a JSON text."""
    pieces = (base64.b64encode(data[begin : begin + _PIECE_VALUES]) for begin in range(0, len(data), _PIECE_VALUES))
    return b'"%s"' % b"".join(pieces)


def json_list(entries: Iterable[bytes]) -> bytes:
    """Return a JSON list of entries that are JSON already."""
    return b"[%s]" % b",".join(entries)


def json_object(head: Mapping[str, Any], **members: bytes) -> bytes:
    """Return a JSON object with the members of `head`, which is not empty, and further ones that are JSON already."""
    further = b"".join(b',"%s":%s' % (name.encode(), member) for name, member in members.items())
    return b"%s%s}" % (to_json(head)[:-1], further)


async def respond(
    request: Request,
    head: Json,
    rows: Sequence[Values],
    fields: EncodingFields,
    *,
    kind: str,
    name: str,
) -> Response:
    """Return the answer with one entry in `data` for each result.

    Args:
        head: the fields of the answer besides `data`.
        kind: the `object` of each entry, such as "embedding".
        name: the field of an entry that has the result.
    """
    if fields.encoding_format in ("bytes", "bytes_only"):
        return await written(request, rows, lambda: _bytes_response(head, rows, fields))

    def write() -> Response:
        entries = (
            b'{"index":%d,"object":"%s","%s":%s}' % (index, kind.encode(), name.encode(), value_json(values, fields))
            for index, values in enumerate(rows)
        )
        return written_json(json_object(head, data=json_list(entries)))

    return await written(request, rows, write)


async def written(
    request: Request, rows: Sequence[Values], write: Callable[[], Response], characters: int = 0
) -> Response:
    """Return the response that `write` makes of results, on a thread if there are many values.

    Args:
        characters: number of characters of texts in the answer.
    """
    is_small = sum(values.size for values in rows) + characters <= SMALL_VALUES
    return write() if is_small else await aside(request, write)


def written_json(body: bytes) -> Response:
    """Return a response whose body is JSON already."""
    return Response(body, media_type="application/json")


def _bytes_response(head: Mapping[str, Any], rows: Sequence[Values], fields: EncodingFields) -> Response:
    pieces = [to_bytes(values, fields.embed_dtype, fields.endianness) for values in rows]
    headers = {}
    if fields.encoding_format == "bytes":
        items, begin = [], 0
        for index, (values, piece) in enumerate(zip(rows, pieces, strict=True)):
            place = {"start": begin, "end": begin + len(piece), "shape": list(values.shape)}
            items.append({"index": index, "embed_dtype": fields.embed_dtype, "endianness": fields.endianness, **place})
            begin += len(piece)
        # In ASCII, unlike to_json, because a header must be.
        headers["metadata"] = json.dumps({**head, "data": items})
    return Response(b"".join(pieces), media_type="application/octet-stream", headers=headers)
