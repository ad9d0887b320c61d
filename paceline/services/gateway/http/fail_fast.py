"""The base class of everything that is read from a client's JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema


class FailFast(BaseModel):
    """A model whose lists and objects end at their first error, because a million errors would fill the memory."""

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
                left += part.values()
            elif isinstance(part, list | tuple):
                left += part
        return schema
