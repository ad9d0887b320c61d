"""JSON of the planner's values: reports, objectives, decisions and the planner's state."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from paceline.core.errors import InvalidRequestError

T = TypeVar("T")


@lru_cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_json(value: object) -> str:
    """Return a value of the planner as one line of JSON."""
    return _adapter(type(value)).dump_json(value).decode()


def from_json(kind: type[T], text: str | bytes) -> T:
    """Return the value that `to_json` wrote. Raises InvalidRequestError that says what is wrong."""
    try:
        value: T = _adapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(f"this is no {kind.__name__}: {place or 'the text'}: {first['msg']}") from None
    return value
