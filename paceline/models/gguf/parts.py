"""The names of split GGUF files: NAME-00001-of-00003.gguf and so on. Imports no torch."""

from __future__ import annotations

import re

from paceline.core.errors import ModelError

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_MOST_PARTS = 1000


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a GGUF file, given the name of its first part or of a file that is not split.

    Raises:
        ModelError: another part was given.
    """
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    count = int(found["count"])
    if not 1 <= count <= _MOST_PARTS or int(found["number"]) != 1:
        raise ModelError(f"{name} is not the first part of a GGUF file; give {_part(name, found, 1)}")
    return [_part(name, found, number) for number in range(1, count + 1)]


def link_names(count: int) -> list[str]:
    """Return the names of a folder's links to the parts of a GGUF file."""
    return part_names("weights.gguf" if count == 1 else f"weights-00001-of-{count:05}.gguf")


def gguf_stem(name: str) -> str:
    """Return the name of a GGUF file without its suffix and without the number of its part."""
    found = _PART.fullmatch(name)
    return found["name"] if found else re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)


def _part(name: str, found: re.Match[str], number: int) -> str:
    start, end = found.span("number")
    return f"{name[:start]}{number:05}{name[end:]}"
