"""Which blocks that another host names belong here, and which of them have come. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import TransferError
from paceline.core.kv_layout import BASE_TOKENS, NO_SLOT, KVGroup
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.kvtransfer.lease import Lease


def check_names(groups: Sequence[KVGroup], blocks: Sequence[pb.ExportedBlock], hashes: Sequence[bytes]) -> None:
    """Raises TransferError where the source names blocks of another context.

    Args:
        hashes: the chain of this one.
    """
    strides = [group.block_tokens // BASE_TOKENS for group in groups]
    for block in blocks:
        end = (block.index + 1) * strides[block.group] if block.group < len(strides) else 0
        if not 0 < end <= len(hashes) or block.hash != hashes[end - 1]:
            raise TransferError(f"block {block.index} of group {block.group} is of another context")


class Arrivals:
    """Which blocks of a lease have come: each that is needed has to, once."""

    def __init__(self, groups: Sequence[KVGroup], lease: Lease) -> None:
        self._groups = groups
        self._lease = lease
        self._first = [lease.filled_tokens // group.block_tokens for group in groups]
        """Of each group, the first block that is not here from the beginning."""
        self._come: list[set[int]] = [set() for _ in groups]

    def places(self, blocks: Sequence[pb.ExportedBlock]) -> list[int]:
        """The slot here for each block. Raises TransferError for what was not to come."""
        return [self._place(block.group, block.index) for block in blocks]

    def _place(self, group: int, index: int) -> int:
        table = self._lease.tables[group] if group < len(self._groups) else []
        if index >= len(table) or table[index] == NO_SLOT or index < self._first[group] or index in self._come[group]:
            raise TransferError(f"block {index} of group {group} came, and there is no place for it")
        self._come[group].add(index)
        return table[index]

    def check_all(self, filled_tokens: int) -> None:
        """Raises TransferError where a block is missing without which the context cannot be read."""
        for number, group in enumerate(self._groups):
            first = max(self._first[number], group.first_needed_block(filled_tokens))
            missing = set(range(first, group.blocks_for(filled_tokens))) - self._come[number]
            if missing:
                raise TransferError(f"{len(missing)} blocks of group {number} have not come")
