"""The base class of everything that is read from a client's JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


class FailFast(BaseModel):
    """A model whose lists and objects end at their first error, because a million errors would fill the memory.

    A field for an integer takes 5.0, too: JSON has one kind of numbers, and some clients write each with a point.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        if cls.__pydantic_complete__:
            return schema  # it was marked when the class was made
        left: list[object] = [schema]
        while left:
            part = left.pop()
            if isinstance(part, dict):
                if part.get("type") in ("list", "dict"):
                    part["fail_fast"] = True
                elif part.get("type") in ("model-field", "default", "nullable") and part["schema"]["type"] == "int":
                    # Not within lists: to call a function for each of their numbers would take long.
                    part["schema"] = core_schema.no_info_before_validator_function(_whole, part["schema"])
                left += part.values()
            elif isinstance(part, list | tuple):
                left += part
        return schema


def _whole(value: object) -> object:
    """Return a number without a fraction as an integer, and all else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
