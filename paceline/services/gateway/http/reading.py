"""Routes that parse and validate large bodies on a thread, so that the event loop goes on."""

from __future__ import annotations

import codecs
import contextlib
import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json

from paceline.services.gateway.http.bounds import PIECE_BYTES, Bounds
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.request_scope import scope_of

SLOW_BYTES = 1 << 20
"""Largest body that Python's own parser may read, in bytes."""
SMALL_BYTES, SMALL_VALUES = 64 << 10, 1000
"""Largest body that is read on the event loop, in bytes and in values. Reading it takes about a millisecond."""

_SHAPES = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE_SHAPES = b"0e000", b"0e+000", b"0" * 200
"""At least one of these is in each number that may be too large for a double, if all its digits are written as 0."""
_NOTHING = object()

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Checked:
    """A body that has been validated."""

    def __init__(self, value: Any) -> None:
        self.value = value


class BodyRoute(APIRoute):
    """A route whose JSON body is counted, parsed and validated by `read_body`, on a thread unless it is small.

    The framework would parse and validate it on the event loop, and all streams would wait meanwhile.
    """

    def get_route_handler(self) -> Handler:
        fields: list[Any] = self.dependant.body_params
        if len(fields) != 1:
            return super().get_route_handler()
        field = fields[0]
        if not isinstance(field, _CheckedField):
            fields[0] = field = _CheckedField(field)
        handle = super().get_route_handler()

        async def read_and_handle(request: Request) -> Response:
            body = await request.body()
            if body and is_json(request):
                # The framework finds this in the place of the parsed body.
                request._json = await _read(request, body, field)
            return await handle(request)

        return read_and_handle


class _CheckedField:
    """Replaces the framework's description of a body: it accepts the body that `read_body` has already validated."""

    def __init__(self, field: Any) -> None:
        self.field = field

    def __getattr__(self, name: str) -> Any:
        return getattr(self.field, name)

    def validate(self, value: Any, values: dict[str, Any], *, loc: tuple[int | str, ...]) -> tuple[Any, list[Any]]:
        if isinstance(value, Checked):
            return value.value, []
        found: tuple[Any, list[Any]] = self.field.validate(value, values, loc=loc)
        return found


async def _read(request: Request, body: bytes, field: _CheckedField) -> Checked:
    scope = scope_of(request)
    if len(body) <= SMALL_BYTES and scope.json_count.values <= SMALL_VALUES:
        return read_body(body, field, scope.bounds)
    return await scope.pool.run_alone(scope.owner, read_body, body, field, scope.bounds)


def read_body(body: bytes, field: Any, bounds: Bounds) -> Checked:
    """Parse and validate a body, and return the result.

    Args:
        field: the framework's description of the body.

    Raises RequestValidationError or ApiError if the body is not valid.
    """
    value = parse(body)
    bounds.check_lists(value)
    model, errors = field.validate(value, {}, loc=("body",))
    if errors:
        raise RequestValidationError(errors, body=value)
    return Checked(model)


def read_json(text: bytes) -> Any:
    """Parse a JSON text from a client.

    The text must be UTF-8, as the standard says and `JsonCount` needs. This parser is several times as fast as
    Python's. No other thread runs while it parses.

    Raises ValueError if the text is not valid, is nested too deeply, or has a number that is too large for a double:
    such a number becomes infinity, which JSON cannot express.
    """
    text = text.removeprefix(codecs.BOM_UTF8)
    try:
        # Without its cache of strings, distinct names take half of the time.
        value = from_json(text, allow_inf_nan=False, cache_strings="none")
    except ValueError:
        if len(text) > SLOW_BYTES or b"\\u" not in text:
            raise
        # Half of a surrogate pair, which clients leave where they cut a text, is for Python's parser alone.
        value = _NOTHING
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text.decode(), parse_constant=_refuse)
        if value is _NOTHING:
            raise
    if may_have_infinity(value, SMALL_VALUES) and _may_have_large_number(text) and may_have_infinity(value):
        raise ValueError("a number is larger than a double can hold")
    return value


def _may_have_large_number(text: bytes) -> bool:
    """Return whether a text may have a number that is too large for a double.

    It is searched in pieces, because no other thread runs during one search. A regular expression would take some 20 ns
    for each byte, during which no other thread runs either.
    """
    for begin in range(0, len(text), PIECE_BYTES):
        piece = text[begin : begin + PIECE_BYTES + max(map(len, _LARGE_SHAPES)) - 1].translate(_SHAPES)
        if any(shape in piece for shape in _LARGE_SHAPES):
            return True
    return False


def may_have_infinity(value: Any, most: float = math.inf) -> bool:
    """Return whether a parsed JSON value contains a number that was too large for a double and became infinite.

    Also return True if it is not known, because the value contains more than `most` values.
    """
    left = [value]
    while left:
        match left.pop():
            case float(number) if math.isinf(number):
                return True
            case dict(members):
                left += members.values()
            case list(entries):
                left += entries
        if len(left) > most:
            return True
        most -= 1
    return False


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def parse(text: bytes) -> Any:
    """Parse the JSON text of a body with `read_json`.

    Raises ApiError if the JSON is nested too deeply, or RequestValidationError if it is not valid.
    """
    try:
        return read_json(text)
    except ValueError as error:
        told = str(error)
    if told.startswith("recursion limit"):
        raise ApiError(400, "the body is nested too deeply: JSON can have about 200 levels here")
    place = {"type": "json_invalid", "loc": ("body",), "msg": told, "input": {}}
    raise RequestValidationError([{**place, "ctx": {"error": told}}])


def is_json(request: Request) -> bool:
    """Return whether a request's Content-Type says that its body is JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind.startswith("application/") and (kind == "application/json" or kind.endswith("+json"))
