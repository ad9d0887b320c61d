"""An index of the blocks that each host has cached, kept up to date by the hosts' block events. Pure.

The router uses the index to find the host that has cached the longest prefix of a context. The index is a hint and may
be wrong. If it lists a block that is gone, there is a cache miss; if it lacks a block, a prefix is computed again. The
homes of cache keys are a hint of the same kind, from the clients.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from paceline.core.block_pool import BlockEvent
from paceline.core.context import Context, encoding_context
from paceline.core.kv_layout import BASE_TOKENS, KVLayout
from paceline.core.prefix import BlockHolders
from paceline.services.common.streams import BlockBatch

_MOST_BLOCKS = 1 << 18
"""Largest number of blocks of one host in the index. Further blocks are ignored."""


_MOST_ENDS = 1 << 16
"""Largest number of places at which ends of requests are recorded. A place is a block of BASE_TOKENS tokens of a
context, and takes about 90 bytes."""
_ANY_LAYOUT = ""
"""Stands for a layout's fingerprint in the links that identify places, because places do not depend on layouts."""
_TRIED_ENDS = 16
"""Largest number of places that are looked up for one context."""


class IndexedBlocks:
    """The blocks of one host that can be reused, as of the event before `next_event` of its pool.

    Args:
        pool: id of the host's pool; it changes when the pool is created anew.
        next_event: number of the first event that has not been applied.
        names: the names of the cached blocks of each KV group, in the order of `layout.all_groups`.
    """

    def __init__(self, pool: str, next_event: int, layout: KVLayout, names: Sequence[Sequence[bytes]]) -> None:
        self.pool = pool
        self.next_event = next_event
        self.layout = layout
        self.names = [set(group) for group in names]

    def __len__(self) -> int:
        return sum(map(len, self.names))

    def apply(self, batch: BlockBatch) -> list[BlockEvent] | None:
        """Apply a batch of events, and return the events that have changed the blocks.

        Returns None if events before the batch are missing, or if the host has another pool now.
        """
        known = self.next_event - batch.first
        if batch.pool != self.pool or known < 0:
            return None
        news = [event for event in batch.events[known:] if event.group < len(self.names) and self._change(event)]
        self.next_event = max(self.next_event, batch.first + len(batch.events))
        return news

    def _change(self, event: BlockEvent) -> bool:
        """Apply one event. Return whether it has changed the blocks."""
        op, group, name = event
        names = self.names[group]
        if (op == "stored") == (name in names) or (op == "stored" and len(self) >= _MOST_BLOCKS):
            return False
        if op == "stored":
            names.add(name)
        else:
            names.discard(name)
        return True

    @property
    def fingerprint(self) -> str:
        return self.layout.fingerprint

    def blocks(self) -> Iterator[tuple[bytes, int]]:
        """Yield name and length in tokens of each block of the first KV group. Other groups hold the same contexts."""
        for name in self.names[0]:
            yield name, self.layout.groups[0].block_tokens


class _Host(NamedTuple):
    """The blocks of one host in the index."""

    number: int
    """Number by which `holders` refers to the host."""
    blocks: IndexedBlocks
    holders: BlockHolders
    """Sets of the hosts that have each block, for all hosts with this host's layout."""


class PrefixIndex:
    """The cached blocks of all hosts, by host id. A search looks up each block once, however many hosts there are.

    A block takes about 125 bytes, plus 40 bytes for each host that has it.
    """

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._ids: dict[int, str] = {}
        """Ids of the hosts, by the hosts' numbers."""
        self._holders: dict[KVLayout, BlockHolders] = {}
        self._layouts: Mapping[str, str] = {}
        self._ends: dict[bytes, int] = {}
        """For the cache salt and the last link before each noted end (see `_place`), the numbers of tokens after it at
        which contexts end, as a set of bits. Oldest first."""

    def host(self, host_id: str) -> IndexedBlocks | None:
        host = self._hosts.get(host_id)
        return None if host is None else host.blocks

    def hosts(self) -> list[str]:
        return sorted(self._hosts)

    def replace(self, host_id: str, blocks: IndexedBlocks) -> None:
        """Replace all blocks of a host with the list that the host has sent."""
        before = self._hosts.get(host_id)
        if before is not None and before.blocks.layout != blocks.layout:
            self.forget(host_id)
            before = None
        if before is None:
            number = next(number for number in itertools.count() if number not in self._ids)
            holders = self._holders.setdefault(blocks.layout, BlockHolders(blocks.layout))
            self._ids[number] = host_id
            self._layouts = {**self._layouts, host_id: blocks.fingerprint}
        else:
            number, _, holders = before
        holders.apply(number, _changes(() if before is None else before.blocks.names, blocks.names))
        self._hosts[host_id] = _Host(number, blocks, holders)

    def forget(self, host_id: str) -> None:
        host = self._hosts.pop(host_id, None)
        if host is None:
            return
        del self._ids[host.number]
        host.holders.apply(host.number, _changes(host.blocks.names, ()))
        if not any(other.holders is host.holders for other in self._hosts.values()):
            del self._holders[host.blocks.layout]
        self._layouts = {name: fingerprint for name, fingerprint in self._layouts.items() if name != host_id}

    def apply(self, batch: BlockBatch) -> bool:
        """Apply events that a host has published. Return False if events were missed: the whole list is needed then."""
        host = self._hosts.get(batch.host_id)
        if host is None or (news := host.blocks.apply(batch)) is None:
            return False
        host.holders.apply(host.number, news)
        return True

    def layouts(self) -> Mapping[str, str]:
        """Return the layout fingerprint of each host's blocks, by host id. The returned mapping never changes later."""
        return self._layouts

    def cached_tokens(self, context: Context, most: int) -> Mapping[str, int]:
        """Return how many of a context's first `most` tokens each host has cached, by host id, without hosts with 0."""
        ends = self.ends(context)
        found = (
            holders.cached_tokens(context.links(layout.fingerprint), most, context.tails(layout.fingerprint, ends))
            for layout, holders in self._holders.items()
        )
        cached: dict[str, int] = {}
        for each in found:
            cached.update(zip(map(self._ids.__getitem__, each), each.values()))  # there may be many hosts
        return cached

    def note_end(self, context: Context, length: int) -> None:
        """Note that a request has ended after the first `length` tokens of a context. Hosts whose layout has states may
        have cached the last blocks before this length although the blocks are not full."""
        count, more = divmod(length, BASE_TOKENS)
        if count and (not self._holders or any(layout.keeps_tails for layout in self._holders)):
            place = _place(context, context.links(_ANY_LAYOUT)[count - 1])
            self._ends[place] = self._ends.pop(place, 0) | 1 << more
        while len(self._ends) > _MOST_ENDS:
            del self._ends[next(iter(self._ends))]

    def ends(self, context: Context) -> list[int]:
        """Return lengths in tokens at which other requests may have ended in this context, in ascending order. If there
        are many, only the longest ones are returned."""
        links = context.links(_ANY_LAYOUT) if self._ends else ()
        known = (
            (count, bits) for count, link in enumerate(links, 1) if (bits := self._ends.get(_place(context, link)))
        )
        lengths = (
            count * BASE_TOKENS + more for count, bits in known for more in range(BASE_TOKENS) if bits >> more & 1
        )
        return [length for length in lengths if length < len(context)][-_TRIED_ENDS:]

    def encoding_hosts(self, digest: bytes, length: int, cache_salt: str) -> list[str]:
        """Return the ids of the hosts that have cached an encoding. The arguments are those of `encoding_context`."""
        found: list[str] = []
        for layout, holders in self._holders.items():
            if layout.encodings is not None:
                context = encoding_context(digest, length, cache_salt, layout)
                rows = holders.cached_rows(context.links(layout.encodings.fingerprint), len(context))
                found += [self._ids[number] for number, count in rows.items() if count == len(context)]
        return sorted(found)


def _place(context: Context, link: bytes) -> bytes:
    """Return the key of a place in a context. It contains the cache salt, because contexts of several owners have the
    same links in a shared prompt."""
    return context.cache_salt.encode() + link  # all links have one length, and bytes take less memory than a pair


def _changes(before: Sequence[Set[bytes]], after: Sequence[Set[bytes]]) -> Iterator[tuple[str, int, bytes]]:
    """Yield the events that lead from one state of a host's blocks to another: its sets of block names by KV group."""
    for group, (old, new) in enumerate(itertools.zip_longest(before, after, fillvalue=frozenset[bytes]())):
        yield from (("removed", group, name) for name in old - new)
        yield from (("stored", group, name) for name in new - old)


MOST_KEYS = 1 << 16
"""Largest number of `prompt_cache_key`s whose homes are kept. The key that was used longest ago is dropped first."""


class Homes:
    """The home of each `prompt_cache_key`: the host that computed the latest prompt with it."""

    def __init__(self) -> None:
        self._hosts: OrderedDict[bytes, str] = OrderedDict()
        """Ids of hosts, by digests of owner and key, because a client's keys may be long."""

    def get(self, owner: str, cache_key: str) -> str:
        """Return the id of a key's home; "" if the request has no key, or if the key is new.

        Args:
            owner: digest of the client's API key, because clients may choose equal names.
            cache_key: the request's `prompt_cache_key`; "" if it has none.
        """
        return self._hosts.get(_digest(owner, cache_key), "") if cache_key else ""

    def put(self, owner: str, cache_key: str, host_id: str) -> None:
        """Make a host the home of a key. Do nothing if the request has no key."""
        if cache_key:
            key = _digest(owner, cache_key)
            self._hosts[key] = host_id
            self._hosts.move_to_end(key)
            if len(self._hosts) > MOST_KEYS:
                self._hosts.popitem(last=False)


def _digest(owner: str, cache_key: str) -> bytes:
    return hashlib.blake2b(f"{owner} {cache_key}".encode(), digest_size=16).digest()
