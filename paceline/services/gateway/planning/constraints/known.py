"""Outcomes of trials that are remembered, so that a constraint is compiled on trial once."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from paceline.core.errors import InvalidRequestError
from paceline.core.types import Constraint

Outcome: TypeAlias = Constraint | InvalidRequestError | None
"""The constraint, or the error that its request gets; None if there is nothing to constrain."""

_BASE_BYTES = 1 << 10
"""Memory of an outcome beside its texts."""


class KnownOutcomes:
    """The last outcomes of each owner, up to a sum of bytes. If they are too many, the largest owner's oldest goes.

    An owner gets only its own outcomes. Otherwise the time of an answer would tell what others have sent.
    """

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._owners: dict[str, OrderedDict[bytes, Outcome]] = {}
        self._bytes: dict[str, int] = {}

    def find(self, owner: str, digest: bytes) -> tuple[Outcome] | None:
        """Return the outcome as a tuple of one; None if it is not known."""
        own = self._owners.get(owner)
        if own is None or digest not in own:
            return None
        own.move_to_end(digest)
        return (own[digest],)

    def add(self, owner: str, digest: bytes, outcome: Outcome) -> None:
        """Remember an outcome."""
        own = self._owners.setdefault(owner, OrderedDict())
        if digest in own:
            return
        own[digest] = outcome
        self._count(owner, _size(outcome))
        while self._left < 0:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            _, oldest = self._owners[largest].popitem(last=False)
            self._count(largest, -_size(oldest))
            if not self._owners[largest]:
                del self._owners[largest], self._bytes[largest]

    def _count(self, owner: str, size: int) -> None:
        self._bytes[owner] = self._bytes.get(owner, 0) + size
        self._left -= size


def _size(outcome: Outcome) -> int:
    if isinstance(outcome, Constraint):
        return _BASE_BYTES + len(outcome.text) + len(outcome.grammar) + sum(map(len, outcome.unenforced))
    return _BASE_BYTES + len(str(outcome))
