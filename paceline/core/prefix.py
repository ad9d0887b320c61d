"""Search for the longest prefix of a context whose blocks are cached, by one host or by many, and an index of the
hosts that have each block."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from paceline.core.context import Tail, full_block_names
from paceline.core.kv_layout import BASE_TOKENS, NO_SLOT, KVGroup, KVLayout

Find = Callable[[int, bytes], int | None]
"""A function that takes a group number and a hash, and returns the slot of the block; None if it is not cached."""

HostSet = int
"""A set of hosts. Bit n is set if the host with the number n is in it."""
_ALL_HOSTS: HostSet = -1

_BITS = bytes.maketrans(b"01", b"\0\1")
"""Table that turns the characters "0" and "1" into the bytes 0 and 1."""


def match_prefix(
    layout: KVLayout, find: Find, links: Sequence[bytes], max_tokens: int, tails: Sequence[Tail] = ()
) -> tuple[int, list[list[int]]]:
    """Return the longest prefix that can be reused.

    The prefix ends at a tail, or on a block boundary of every group. For groups with full attention, all blocks of the
    prefix are cached. For groups with a window, the blocks that a query after the prefix still reads are cached.

    Args:
        layout: the layout of KV or of encodings.
        links: the links of the context.
        max_tokens: largest number of tokens to reuse.
        tails: tails of the context, in any order.

    Returns:
        The length in tokens, and a block table for each group, with NO_SLOT before the window.
    """
    length, tables = _match_full_blocks(layout, find, links, max_tokens)
    for tail in sorted(tails, reverse=True):
        if not length < tail.length <= max_tokens:
            continue
        slots = [[find(*name) for name in names] for names in _tail_names(layout, links, tail)]
        if not any(None in found for found in slots):
            needed = [group.first_needed_block(tail.length) for group in layout.groups]
            return tail.length, [[NO_SLOT] * first + cast(list[int], found) for first, found in zip(needed, slots)]
    return length, tables


def _tail_names(layout: KVLayout, links: Sequence[bytes], tail: Tail) -> Iterator[list[tuple[int, bytes]]]:
    """Yield for each group the names of the blocks that a query after a tail reads."""
    for number, group in enumerate(layout.groups, layout.first_group):
        names = [*full_block_names(group, links, tail.length)]
        if tail.length % group.block_tokens:
            names.append(tail.name)
        yield [(number, name) for name in names[group.first_needed_block(tail.length) :]]


def _match_full_blocks(
    layout: KVLayout, find: Find, links: Sequence[bytes], max_tokens: int
) -> tuple[int, list[list[int]]]:
    """Return the longest prefix of full blocks, as `match_prefix` does."""
    align = layout.alignment
    length = min(max_tokens, len(links) * BASE_TOKENS) // align * align
    found: dict[int, list[int | None]] = {}
    # Groups with full attention first, because their first missing block limits the prefix for all groups.
    for index, group in sorted(enumerate(layout.groups), key=lambda entry: entry[1].shape.window > 0):
        slots = found[index] = []
        for digest in full_block_names(group, links, length):
            slot = find(layout.first_group + index, digest)
            if slot is None and group.shape.window == 0:
                length = len(slots) * group.block_tokens // align * align
                break
            slots.append(slot)

    def missing(index: int, group: KVGroup) -> bool:
        return None in found[index][group.first_needed_block(length) : length // group.block_tokens]

    while length > 0 and any(missing(index, group) for index, group in enumerate(layout.groups)):
        length -= align
    return length, [_table(group, found[index], length) for index, group in enumerate(layout.groups)]


def match_prefixes(
    layout: KVLayout,
    holders: Sequence[Mapping[bytes, HostSet]],
    links: Sequence[bytes],
    max_tokens: int,
    tails: Sequence[Tail] = (),
) -> dict[int, int]:
    """Return the longest prefix that each of many hosts can reuse, by the rule of `match_prefix`.

    Args:
        layout, links, max_tokens, tails: the arguments of `match_prefix`.
        holders: for each group by its number, the hosts that have cached the block with a name.

    Returns:
        Lengths in tokens by the numbers of hosts. Hosts that can reuse nothing are left out.
    """
    align = layout.alignment
    most = min(max_tokens, len(links) * BASE_TOKENS) // align * align
    blocks = [
        _Blocks(group, full_block_names(group, links, most), holders[layout.first_group + index])
        for index, group in enumerate(layout.groups)
    ]
    full = [each for each in blocks if not each.group.shape.window]
    windowed = [each for each in blocks if each.group.shape.window]
    found: dict[int, int] = {}
    for length, hosts in _full_prefixes(full, most, align):
        while hosts and length > 0:
            able = _with_windows(windowed, hosts, length)
            found.update(dict.fromkeys(host_numbers(able), length))
            hosts, length = hosts & ~able, length - align
    for tail in sorted(tails):
        if tail.length <= max_tokens:
            able = _ALL_HOSTS
            for group, name in itertools.chain(*_tail_names(layout, links, tail)):
                able &= holders[group].get(name, 0)
            found.update({host: tail.length for host in host_numbers(able) if found.get(host, 0) < tail.length})
    return found


class _Blocks(NamedTuple):
    """The blocks of one group in a context, and the hosts that hold them."""

    group: KVGroup
    names: Sequence[bytes]
    holders: Mapping[bytes, HostSet]


def _full_prefixes(groups: Sequence[_Blocks], most: int, align: int) -> Iterator[tuple[int, HostSet]]:
    """Yield lengths, each with the hosts whose cached blocks of groups with full attention end exactly there."""
    here = _ALL_HOSTS
    steps = [(names, holders, align // group.block_tokens) for group, names, holders in groups]
    for step in range(most // align):
        still = here
        for names, holders, blocks in steps:
            for name in names[step * blocks : (step + 1) * blocks]:
                still &= holders.get(name, 0)
        if still != here:
            yield step * align, here & ~still
            if not still:
                return
            here = still
    yield most, here


def _with_windows(groups: Sequence[_Blocks], hosts: HostSet, length: int) -> HostSet:
    """Return the hosts of `hosts` with all blocks, of groups with a window, that a query after the prefix reads."""
    for group, names, holders in groups:
        for index in reversed(range(group.first_needed_block(length), length // group.block_tokens)):
            hosts &= holders.get(names[index], 0)
            if not hosts:
                return 0
    return hosts


def host_numbers(hosts: HostSet) -> Iterator[int]:
    """Return the numbers of the hosts in a set, ascending. The set must not be `_ALL_HOSTS`."""
    return itertools.compress(itertools.count(), bin(hosts)[:1:-1].encode().translate(_BITS))


def lacking_links(layout: KVLayout, find: Find, links: Sequence[bytes]) -> Sequence[bytes]:
    """Return the links of the tokens that follow the longest cached prefix, up to the last full unit of reuse."""
    most = len(links) * BASE_TOKENS // layout.alignment * layout.alignment
    length, _ = match_prefix(layout, find, links, most)
    return links[length // BASE_TOKENS : most // BASE_TOKENS]


def _table(group: KVGroup, found: Sequence[int | None], length: int) -> list[int]:
    needed = group.first_needed_block(length)
    return [
        slot if slot is not None and index >= needed else NO_SLOT
        for index, slot in enumerate(found[: length // group.block_tokens])
    ]


class BlockHolders:
    """The hosts that have cached each block of one layout. Hosts have numbers from 0; low numbers take less memory."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._holders: tuple[dict[bytes, HostSet], ...] = tuple({} for _ in layout.all_groups)
        """For each group, a map from a block's name to the hosts that have it. Blocks that no host has are left out."""

    def apply(self, host: int, events: Iterable[tuple[str, int, bytes]]) -> None:
        """Note blocks that became or ceased to be reusable on a host.

        Args:
            host: number of the host, from 0.
            events: `BlockEvent`s, or tuples with the same three values.
        """
        bit = 1 << host
        for op, group, name in events:
            holders = self._holders[group]
            if op == "stored":
                known = holders.get(name)
                # Most blocks have one holder. They share one integer.
                holders[name] = bit if known is None else known | bit
            elif left := holders.get(name, 0) & ~bit:
                holders[name] = left
            else:
                holders.pop(name, None)

    def cached_tokens(self, links: Sequence[bytes], most: int, tails: Sequence[Tail] = ()) -> dict[int, int]:
        """Return the length of the longest cached prefix by host number, in tokens. Hosts that have none are left out.

        Args:
            links: the links of the context.
            most: largest number of tokens of the context to reuse.
            tails: tails of the context that may be cached.
        """
        return match_prefixes(self.layout, self._holders, links, most, tails)

    def cached_rows(self, links: Sequence[bytes], rows: int) -> dict[int, int]:
        """Return how many of an encoding's first `rows` rows each host has cached. Hosts that have none are left out.

        Raises InvalidRequestError if the layout has no encodings.
        """
        return match_prefixes(self.layout.part(encoding=True), self._holders, links, rows)
