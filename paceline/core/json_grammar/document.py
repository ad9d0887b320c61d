"""A schema's document: the places of its parts, and the targets of references."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urljoin

from paceline.core.errors import ConstraintError

_PATH_CHARACTERS = 300
"""Largest number of characters of a path. Each message and each listed keyword contains a path, and names may be long.
"""


class SchemaDocument:
    """A schema with all its parts. The parts are looked up by their identity, so they have to stay alive."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._places: dict[int, tuple[int, object]] = {}
        """For each part, the identity of the part around it, and its key there."""
        self._named: dict[str, Any] = {}
        """Parts with an `$id` or an `$anchor`."""
        self._base = root.get("$id", "") if isinstance(root, dict) and isinstance(root.get("$id"), str) else ""
        left = [root]
        while left:
            part = left.pop()
            if isinstance(part, dict):
                self._name(part)
            for key, value in part.items() if isinstance(part, dict) else enumerate(part):
                if isinstance(value, dict | list):
                    self._places[id(value)] = id(part), key
                    left.append(value)

    def _name(self, part: dict[str, Any]) -> None:
        for key in ("$id", "id"):
            if isinstance(part.get(key), str):
                self._named.setdefault(urljoin(self._base, part[key]).removesuffix("#"), part)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(part.get(key), str):
                self._named.setdefault(f"#{part[key]}", part)

    def path(self, part: object) -> str:
        """Return the path of a part, as names with dots between them; "" for the root. Long names and paths are cut."""
        names: list[str] = []
        at = id(part)
        while at in self._places:
            at, key = self._places[at]
            names.append(str(key)[:_PATH_CHARACTERS])
        return ".".join(reversed(names))[:_PATH_CHARACTERS]

    def resolve(self, reference: object) -> Any:
        """Return the target of a reference. Raises ConstraintError if it is not in the document."""
        if not isinstance(reference, str):
            raise ConstraintError('"$ref" must be a string')
        address, _, fragment = reference.partition("#")
        root = self.root
        if address and urljoin(self._base, address) != self._base:
            root = self._named.get(urljoin(self._base, address))
            if root is None:
                raise ConstraintError(
                    f'"$ref" leads to {reference}, and nothing is fetched; put that schema under "$defs"'
                )
        fragment = unquote(fragment)
        is_name = fragment and not fragment.startswith("/")
        found = self._named.get(f"#{fragment}") if is_name else _at(root, fragment)
        if not isinstance(found, dict | bool):
            raise ConstraintError(f'"$ref" leads to #{fragment}, which the schema does not have; add it there')
        return found


def _at(root: Any, pointer: str) -> Any:
    """Return the target of a JSON pointer; None if it does not exist."""
    place = root
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict):
            place = place.get(name)
        elif isinstance(place, list) and name.isdecimal() and len(name) < 7 and int(name) < len(place):
            place = place[int(name)]
        else:
            return None
    return place
