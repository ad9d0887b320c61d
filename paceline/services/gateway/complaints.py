"""Complaints about the body of a request, with the names that the client wrote.

Where a field may be of several types, pydantic tries each of them, complains once for each, and names the type on the
way to what is wrong with it. A client knows its own body alone: a path leads through that, and through nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_ALL_THAT_FITS = "Input should be "
_AN_OBJECT = "Input should be a JSON object"
_NO_OBJECT = ("dict_type", "model_type", "model_attributes_type")
_NAME_CHARACTERS = 80
"""Of a name that the client made up."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """One rule that a body breaks."""

    place: str
    """The innermost field: "messages[0].role"."""
    rule: str
    """Its name: "missing", "int_type", "less_than_equal"."""
    message: str
    indexes: tuple[int, ...]
    """Those on the way. Of several types that a list could have, the one whose complaint comes last was meant."""

    @classmethod
    def of(cls, error: Mapping[str, Any], body: object) -> Complaint:
        """One entry of pydantic's `errors()` about a request whose JSON was `body`."""
        place, indexes = "", []
        _, *path = error["loc"]
        for depth, part in enumerate(path, 1):
            if isinstance(body, list) and isinstance(part, int):
                place, body = f"{place}[{part}]", body[part] if part < len(body) else None
                indexes.append(part)
            elif isinstance(body, dict) and (part in body or (depth == len(path) and error["type"] == "missing")):
                name = str(part)[:_NAME_CHARACTERS]
                place, body = f"{place}.{name}" if place else name, body.get(part)
        message = _AN_OBJECT if error["type"] in _NO_OBJECT else error["msg"]
        return cls(place, error["type"], message, tuple(indexes))

    @property
    def is_about_type(self) -> bool:
        """Where a field may have several types, all but one of them complain of that."""
        return self.rule.endswith("_type")


def most_telling(complaints: Sequence[Complaint]) -> Complaint:
    """The one to answer with; of what could have stood at its place, all that is known."""
    first = next((complaint for complaint in complaints if not complaint.is_about_type), None)
    if first is not None:
        return first
    furthest = max(complaints, key=lambda complaint: complaint.indexes)
    fitting = [c.message.removeprefix(_ALL_THAT_FITS) for c in complaints if c.place == furthest.place]
    return replace(furthest, message=_ALL_THAT_FITS + " or ".join(dict.fromkeys(fitting)))
