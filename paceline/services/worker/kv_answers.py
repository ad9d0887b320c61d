"""What kvtransfer answers to a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.context import Context
from paceline.core.errors import BusyError, PacelineError, StaleError, UnavailableError
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.wire import key_from_pb


@dataclass(frozen=True, slots=True)
class Hold:
    """Blocks that belong to `key` until they are released or their lease ends."""

    key: Key
    filled_tokens: int
    """Tokens at the front whose KV is in the blocks."""
    tables: list[list[int]]
    context_hash: bytes = b""
    """What the cache, or the prefill worker that has filled the blocks, calls these tokens."""

    def check_context(self, context: Context, layout: str) -> None:
        """Raise UnavailableError if the blocks do not hold the front of `context`.

        Args:
            layout: fingerprint of the KV layout.
        """
        length = self.filled_tokens
        if length and (length > len(context) or self.context_hash != context.name(layout, length)):
            raise UnavailableError(f"{self.key} has blocks of another context")


class Adopted(NamedTuple):
    """What has become of a reservation."""

    hold: Hold
    sealed_blocks: Sequence[int]
    """For each group: so many blocks at the front are sealed, or given back."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came from another host."""

    bytes: int
    path: str
    """The transport; empty where there was nothing to move."""


def checked(result: pb.Result) -> pb.Result:
    """The result of what was carried out. Raises BusyError, StaleError, or PacelineError."""
    if result.code == pb.CODE_OK:
        return result
    if result.code == pb.CODE_EXHAUSTED:
        raise BusyError(result.message)
    if result.code == pb.CODE_INVALID:
        # Workers check what clients ask for, so this is between the two services.
        raise PacelineError(f"kvtransfer refused an operation: {result.message}")
    raise StaleError(result.message)


def hold_from_pb(hold: pb.Hold) -> Hold:
    tables = [list(table.slots) for table in hold.tables]
    return Hold(key_from_pb(hold.key), hold.filled_tokens, tables, hold.context_hash)
