"""A worker's leases, and the answers of kvtransfer that give, change or end them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.context import Context
from paceline.core.errors import BusyError, PacelineError, StaleError, UnavailableError
from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.wire import key_from_pb, key_to_pb


def spare_key(key: Key) -> Key:
    """Return the key of the lease with spare blocks of a request: copies of the blocks at a tail of its prompt.

    No request has this id, because ids have no spaces.
    """
    return key._replace(request_id=f"spare {key.request_id}")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks that belong to `key` until they are released or their lease ends."""

    key: Key
    filled_tokens: int
    """Number of tokens, from the first one on, whose KV is in the blocks."""
    tables: list[list[int]]
    """One block table for each group of KV, or one table for the group of encodings."""
    context_hash: bytes = b""
    """Name of the filled tokens, given by the cache or by the prefill worker that filled the blocks."""

    def check_context(self, context: Context, layout: str) -> None:
        """Raise UnavailableError if the filled blocks belong to another context than the front of `context`.

        Args:
            layout: fingerprint of the KV layout.
        """
        length = self.filled_tokens
        if length and (length > len(context) or self.context_hash != context.name(layout, length)):
            raise UnavailableError(f"{self.key} has blocks of another context")


class Adopted(NamedTuple):
    """A reservation that the prefill worker has filled and this worker has adopted."""

    reservation: Reservation
    sealed_blocks: Sequence[int]
    """For each group, the number of blocks at the front that are sealed or were released."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a transfer from another host."""

    bytes: int
    path: str
    """Name of the transport that moved the blocks; "" if no block had to be moved."""


def checked(result: pb.Result) -> pb.Result:
    """Return `result` if its operation was carried out; otherwise raise BusyError, StaleError or PacelineError."""
    if result.code == pb.CODE_OK:
        return result
    if result.code == pb.CODE_EXHAUSTED:
        raise BusyError(result.message)
    if result.code == pb.CODE_INVALID:
        # Workers check clients' input, so this is a bug in the worker or in kvtransfer.
        raise PacelineError(f"kvtransfer refused an operation: {result.message}")
    raise StaleError(result.message)


def reservation_from_pb(message: pb.Lease) -> Reservation:
    tables = [list(table.slots) for table in message.tables]
    return Reservation(key_from_pb(message.key), message.filled_tokens, tables, message.context_hash)


@dataclass(slots=True)
class _Blocks:
    """The blocks of one lease, as they change."""

    filled_tokens: int
    tables: list[list[int]]
    encoding: bool = False
    """Whether the blocks have an encoding rather than KV."""
    names: dict[int, bytes] = field(default_factory=dict)
    """Names of sealed blocks, by slot."""
    first_kept: dict[int, int] = field(default_factory=dict)
    """For each group, the first block that was not released."""
    in_use: bool = False
    """Whether the engine may read and write the blocks."""

    def trim(self) -> None:
        """Forget released blocks, because their slots may be leased again with other content."""
        for group, first_kept in self.first_kept.items():
            table = self.tables[group]
            for block, slot in enumerate(table[:first_kept]):
                self.names.pop(slot, None)
                table[block] = NO_SLOT

    def claim(self, key: Key, layout: KVLayout, active: bool) -> pb.Claim:
        tables = [
            pb.BlockTable(slots=table, hashes=[b"" if slot == NO_SLOT else self.names.get(slot, b"") for slot in table])
            for table in self.tables
        ]
        # Any token count that needs exactly as many blocks as the tables have is correct.
        groups = layout.part(self.encoding).groups
        return pb.Claim(
            key=key_to_pb(key),
            token_count=min(len(table) * group.block_tokens for group, table in zip(groups, self.tables)),
            filled_tokens=self.filled_tokens,
            tables=tables,
            active=active,
            encoding=self.encoding,
        )


class Leases:
    """The newest lease of each attempt, which has to be renewed, and the blocks that the engine may touch.

    A kvtransfer service that was started again knows no lease and no block. It learns them from `claims`.

    Args:
        on_lost: called for a lease of KV that ended although this worker did not release it. It is not called for an
            encoding, whose blocks stay unchanged until its user has released them.
    """

    def __init__(self, on_lost: Callable[[Key], None]) -> None:
        self._on_lost = on_lost
        self._newest: dict[tuple[str, int], Key] = {}
        self._blocks: dict[Key, _Blocks] = {}

    def __contains__(self, key: Key) -> bool:
        return self._newest.get(key[:2]) == key

    def keys(self) -> list[Key]:
        """Return the keys of all leases that have to be renewed."""
        return list(self._newest.values())

    def add(self, message: pb.Lease) -> None:
        """Note a lease that kvtransfer has given to this worker."""
        key = key_from_pb(message.key)
        self._forget_unused(key)
        blocks = _Blocks(message.filled_tokens, [list(table.slots) for table in message.tables], message.encoding)
        for table in message.tables:
            blocks.names |= {slot: digest for slot, digest in zip(table.slots, table.hashes) if digest}
        self._newest[key[:2]] = key
        self._blocks[key] = blocks

    def adopt(self, key: Key, adoption: pb.Adoption) -> Reservation:
        """Note that the reservation under `key` was filled and now has another key. Return its new state."""
        adopted = self._newest[key[:2]] = key_from_pb(adoption.key)
        blocks = self._blocks[adopted] = self._blocks.pop(key)
        blocks.filled_tokens = adoption.filled_tokens
        blocks.first_kept = {group: count for group, count in enumerate(adoption.trimmed_blocks) if count}
        blocks.trim()
        tables = [list(table) for table in blocks.tables]
        return Reservation(adopted, adoption.filled_tokens, tables, adoption.context_hash)

    def use(self, key: Key) -> None:
        """Note that the engine may read and write the blocks from now on."""
        self._blocks[key].in_use = True

    def grow(self, key: Key, tables: Sequence[Sequence[int]]) -> None:
        if blocks := self._blocks.get(key):
            blocks.tables = [list(table) for table in tables]
            blocks.trim()  # some blocks may have been released since the tables were asked for

    def seal(self, key: Key, group: int, first_block: int, hashes: Sequence[bytes]) -> None:
        if blocks := self._blocks.get(key):
            blocks.names |= dict(zip(blocks.tables[group][first_block:], hashes))

    def trim(self, key: Key, group: int, first_kept_block: int) -> None:
        if blocks := self._blocks.get(key):
            blocks.first_kept[group] = first_kept_block
            blocks.trim()

    def release(self, key: Key) -> None:
        """Note that the engine does not touch the blocks any more, and that the lease needs no renewal."""
        self._stop_renewing(key)
        self._blocks.pop(key, None)
        self._forget_unused(key)

    def spare_of(self, key: Key) -> Key | None:
        """Return the key of the lease with a request's spare blocks; None if it has none, or has given them up."""
        name = spare_key(key)[:2]
        return next((each for each in self._blocks if each[:2] == name), None)

    def lose(self, key: Key) -> None:
        """Note that a lease has ended. The engine may touch the blocks until they are released."""
        self._stop_renewing(key)
        if not (key in self._blocks and self._blocks[key].encoding):
            self._on_lost(key)

    def lose_all(self, keep_used: bool) -> None:
        """Note that the service has ended, and drop leases.

        Args:
            keep_used: whether to keep the leases whose blocks the engine has, and claim them from the next service.
        """
        for key in self.keys():
            if not (keep_used and key in self._blocks and self._blocks[key].in_use):
                self.lose(key)

    def claims(self, layout: KVLayout) -> list[pb.Claim]:
        """Return one claim for each key whose blocks the engine has.

        If a lease has ended, its claim only keeps others from the blocks until the engine has released them.
        """
        return [blocks.claim(key, layout, key in self) for key, blocks in self._blocks.items() if blocks.in_use]

    def _stop_renewing(self, key: Key) -> None:
        # An older generation may be released late, when the attempt has a newer lease, which must be renewed.
        newest = self._newest.get(key[:2])
        if newest is not None and newest.generation <= key.generation:
            del self._newest[key[:2]]

    def _forget_unused(self, key: Key) -> None:
        """Forget blocks of this and older generations unless the engine uses them."""
        older = [each for each in self._blocks if each[:2] == key[:2] and each.generation <= key.generation]
        for each in older:
            if not self._blocks[each].in_use:
                del self._blocks[each]
