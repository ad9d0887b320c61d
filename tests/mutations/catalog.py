"""Mutations: small changes to the source. Each is a bug that a test must notice.

They are data in the TOML files of this folder. `python -m tests.mutations.run` applies them one by one. The ledger's
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
    """The bug in one sentence."""
    before: str
    """Text that the file contains exactly once."""
    after: str
    tests: tuple[str, ...]
    """Test files or folders. At least one of them must fail."""

    def apply(self, source: str) -> str:
        """Return the mutated source. Raises ValueError if it does not contain `before` exactly once."""
        if source.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.file} contains its text {source.count(self.before)} times")
        return source.replace(self.before, self.after)


def load_mutations() -> list[Mutation]:
    """Return all mutations, sorted by file, in each file's order."""
    found = []
    for file in sorted(Path(__file__).parent.glob("*.toml")):
        for fields in tomllib.loads(file.read_text())["mutation"]:
            found.append(Mutation(**{**fields, "tests": tuple(fields["tests"])}))
    return found
