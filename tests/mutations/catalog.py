"""Mutations: small changes to the source, each of which is a bug that a test has to notice.

They are data, in the TOML files beside this one. `python -m tests.mutations.run` applies them one by one. The ledger's
protocol has mutations of its own, in tests/proof/mutations.py.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One bug."""

    name: str
    file: str
    """Path of the changed file, relative to the repository."""
    bug: str
    """What goes wrong, in one sentence."""
    before: str
    """Text that stands in the file exactly once."""
    after: str
    tests: tuple[str, ...]
    """Test files or folders, of which one has to fail."""

    def apply(self, source: str) -> str:
        """Return the mutated source. Raises ValueError if `before` does not stand in it exactly once."""
        if source.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.file} contains its text {source.count(self.before)} times")
        return source.replace(self.before, self.after)


def load_mutations() -> list[Mutation]:
    """Return all mutations, by file and in the order of their files."""
    found = []
    for file in sorted(Path(__file__).parent.glob("*.toml")):
        for fields in tomllib.loads(file.read_text())["mutation"]:
            found.append(Mutation(**{**fields, "tests": tuple(fields["tests"])}))
    return found
