"""Which blocks a worker may be touching, so that it can say so to a kvtransfer service that has forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.wire import key_to_pb


@dataclass(slots=True)
class _Blocks:
    filled_tokens: int
    tables: list[list[int]]
    names: dict[int, bytes] = field(default_factory=dict)
    """By slot: the hashes of sealed blocks."""
    first_kept: dict[int, int] = field(default_factory=dict)
    """By group: blocks before this one were given back."""
    in_use: bool = False
    """Whether the engine has them."""

    def trim(self) -> None:
        """Forgets what was given back: these slots may come again, with another content."""
        for group, first_kept in self.first_kept.items():
            table = self.tables[group]
            for block, slot in enumerate(table[:first_kept]):
                self.names.pop(slot, None)
                table[block] = NO_SLOT


class TouchedBlocks:
    """Remembers holds from when they were obtained until they are given back, as they change in between."""

    def __init__(self) -> None:
        self._holds: dict[Key, _Blocks] = {}

    def obtain(self, key: Key, hold: pb.Hold) -> None:
        self._forget_unused(key)
        blocks = _Blocks(hold.filled_tokens, [list(table.slots) for table in hold.tables])
        for table in hold.tables:
            blocks.names |= {slot: digest for slot, digest in zip(table.slots, table.hashes) if digest}
        self._holds[key] = blocks

    def adopt(self, key: Key, adopted: Key, filled_tokens: int, trimmed_blocks: Sequence[int]) -> list[list[int]]:
        """A reservation is filled, and goes by another key from now on. Returns its tables."""
        blocks = self._holds[adopted] = self._holds.pop(key)
        blocks.filled_tokens = filled_tokens
        blocks.first_kept = {group: count for group, count in enumerate(trimmed_blocks) if count}
        blocks.trim()
        return [list(table) for table in blocks.tables]

    def use(self, key: Key) -> None:
        """From now on the engine may read and write them."""
        self._holds[key].in_use = True

    def is_used(self, key: Key) -> bool:
        return key in self._holds and self._holds[key].in_use

    def grow(self, key: Key, tables: Sequence[Sequence[int]]) -> None:
        if blocks := self._holds.get(key):
            blocks.tables = [list(table) for table in tables]
            blocks.trim()  # what was given back since the tables were asked for

    def seal(self, key: Key, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        if blocks := self._holds.get(key):
            blocks.names |= dict(zip(blocks.tables[group][first_block:], hashes))

    def trim(self, key: Key, group: int, first_kept_block: int) -> None:
        if blocks := self._holds.get(key):
            blocks.first_kept[group] = first_kept_block
            blocks.trim()

    def give_back(self, key: Key) -> None:
        self._holds.pop(key, None)
        self._forget_unused(key)

    def _forget_unused(self, key: Key) -> None:
        """A hold that changed hands, or came to nothing, under an older generation."""
        older = [each for each in self._holds if each[:2] == key[:2] and each.generation <= key.generation]
        for each in older:
            if not self._holds[each].in_use:
                del self._holds[each]

    def claims(self, layout: KVLayout, is_active: Callable[[Key], bool]) -> list[pb.Claim]:
        """Of all that the engine has.

        Args:
            is_active: whether a hold goes on; of others only the blocks must not become somebody else's yet.
        """
        return [_claim(layout, key, blocks, is_active(key)) for key, blocks in self._holds.items() if blocks.in_use]


def _claim(layout: KVLayout, key: Key, blocks: _Blocks, active: bool) -> pb.Claim:
    tables = [
        pb.BlockTable(slots=table, hashes=[b"" if slot == NO_SLOT else blocks.names.get(slot, b"") for slot in table])
        for table in blocks.tables
    ]
    # Any count will do for which the tables have as many blocks as they have.
    tokens = min(len(table) * group.block_tokens for group, table in zip(layout.groups, blocks.tables))
    return pb.Claim(
        key=key_to_pb(key), token_count=tokens, filled_tokens=blocks.filled_tokens, tables=tables, active=active
    )
