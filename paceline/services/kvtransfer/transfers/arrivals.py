"""Checks of blocks from another host: whether each belongs to the context, and whether all have arrived. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import TransferError
from paceline.core.kv_layout import BASE_TOKENS, NO_SLOT, KVGroup
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.ledger.lease import Lease


def check_names(groups: Sequence[KVGroup], blocks: Sequence[pb.ExportedBlock], hashes: Sequence[bytes]) -> None:
    """Raise TransferError if the source names blocks of another context.

    Args:
        groups: the layout's groups.
        blocks: the blocks that the source names.
        hashes: chain of the context that is wanted, one hash for each BASE_TOKENS tokens.
    """
    strides = [group.block_tokens // BASE_TOKENS for group in groups]
    for block in blocks:
        end = (block.index + 1) * strides[block.group] if block.group < len(strides) else 0
        if not 0 < end <= len(hashes) or block.hash != hashes[end - 1]:
            raise TransferError(f"block {block.index} of group {block.group} belongs to another context")


class Arrivals:
    """A record of the blocks of a lease that have arrived. Each block may arrive once, and all needed blocks must
    arrive.
    """

    def __init__(self, groups: Sequence[KVGroup], lease: Lease) -> None:
        self._groups = groups
        self._lease = lease
        self._first = [lease.filled_tokens // group.block_tokens for group in groups]
        """For each group, the index of the first block that was not cached when the lease was reserved."""
        self._come: list[set[int]] = [set() for _ in groups]

    def places(self, blocks: Sequence[pb.ExportedBlock]) -> list[int]:
        """Return the slot on this host for each block, and record the blocks as arrived.

        Raises TransferError if a block is not expected.
        """
        return [self._place(block.group, block.index) for block in blocks]

    def _place(self, group: int, index: int) -> int:
        table = self._lease.tables[group] if group < len(self._groups) else []
        if index >= len(table) or table[index] == NO_SLOT or index < self._first[group] or index in self._come[group]:
            raise TransferError(f"block {index} of group {group} was not expected")
        self._come[group].add(index)
        return table[index]

    def check_all(self, filled_tokens: int) -> None:
        """Raise TransferError if a block is missing that a query after the first `filled_tokens` tokens may read."""
        for number, group in enumerate(self._groups):
            first = max(self._first[number], group.first_needed_block(filled_tokens))
            missing = set(range(first, group.blocks_for(filled_tokens))) - self._come[number]
            if missing:
                raise TransferError(f"{len(missing)} blocks of group {number} have not come")
