"""JSON of the planner's values: reports, objectives, decisions and the planner's state."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from paceline.core.errors import InvalidRequestError

T = TypeVar("T")


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's reader and writer of a type. Making one takes milliseconds, so it is cached."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def to_json(value: object) -> str:
    """Return a value of the planner as one line of JSON."""
    return _adapter(type(value)).dump_json(value).decode()


def from_json(kind: type[T], text: str | bytes) -> T:
    """Return the value that `to_json` wrote. Raises InvalidRequestError, which says what is wrong."""
    try:
        value: T = _adapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(f"this is no {kind.__name__}: {place or 'the text'}: {first['msg']}") from None
    return value
