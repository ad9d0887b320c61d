"""Setups of worlds: requests, workers, blocks, and the number of faults."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass

from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.lru import LRU
from paceline.core.kv_layout import BASE_TOKENS, GroupShape, KVGroup, KVLayout


def make_layout(*groups: tuple[int, int]) -> KVLayout:
    """Make a layout with encodings, whose blocks have 16 rows. Each group of KV is (block_tokens, window)."""
    made = tuple(KVGroup(GroupShape(f"g{i}", (), 0, 0, window), tokens) for i, (tokens, window) in enumerate(groups))
    layout = KVLayout(made, itemsize=0, slot_bytes=4096, fingerprint="proof")
    encoding = KVGroup(GroupShape("encoding", (), 0, 0), 16)
    return dataclasses.replace(layout, encodings=dataclasses.replace(layout, groups=(encoding,), first_group=len(made)))


ONE_GROUP = make_layout((16, 0))
WITH_A_WINDOW = make_layout((16, 0), (32, 16))


@dataclass(frozen=True)
class Request:
    """A client's request."""

    text: str
    """Beginning of the prompt, one letter for each 16 tokens. Equal beginnings have equal KV."""
    tail: int = 4
    """Tokens of the prompt after `text`. If both are empty, the lease has no blocks."""
    growth: int = 0
    """Tokens for which the decode worker requests blocks only after admission."""
    one_token: bool = False
    """Whether the prefill worker's token is the last one, so that there is no handoff."""
    media: str = ""
    """Name of an encoding that the prefill worker reads, one letter for each 16 rows. If empty, it reads none."""

    @property
    def context(self) -> int:
        return len(self.text) * BASE_TOKENS + self.tail

    @property
    def sealable(self) -> int:
        """Number of tokens at the beginning whose blocks can be shared."""
        return len(self.text) * BASE_TOKENS

    @property
    def reusable(self) -> int:
        """Number of links that can be found in a cache. The last token is always computed."""
        return min(len(self.text), max(0, self.context - 1) // BASE_TOKENS)

    @functools.cached_property
    def hashes(self) -> list[bytes]:
        return [hashlib.md5(self.text[: end + 1].encode()).digest() for end in range(len(self.text))]

    @functools.cached_property
    def media_hashes(self) -> list[bytes]:
        return [hashlib.md5(f"encoding {self.media[: end + 1]}".encode()).digest() for end in range(len(self.media))]

    @functools.cached_property
    def name(self) -> bytes:
        """Name of the whole prompt."""
        return hashlib.md5(f"{self.text}, {self.tail}".encode()).digest()

    @functools.cached_property
    def another(self) -> Request:
        """A request of the same length with another text, if it has any text."""
        return dataclasses.replace(self, text=self.text.upper())


@dataclass(frozen=True)
class Setup:
    requests: tuple[Request, ...]
    slots: int
    layout: KVLayout = ONE_GROUP
    decoders: int = 2
    prefillers: int = 2
    places: tuple[int, ...] = ()
    """Host of each worker, decode workers first. If empty, there is one host."""
    cached: tuple[tuple[int, str], ...] = ()
    """(host, text) of each prefix that is cached from the beginning."""
    fetched: str = ""
    """First letters of prompts that the gateway believes to be cached on the other one of two hosts."""
    attempts: int = 2
    """Number of failed attempts after which the gateway gives a request up."""
    faults: int = 0
    """Total number of faults that may happen."""
    policy: type[CachePolicy] = LRU
    """Cache policy of the ledgers."""
    kind: str = ""
    """Name of the only move that may be a fault. If empty, any fault may happen."""

    @property
    def hosts(self) -> int:
        return max((*self.places, *(host for host, _ in self.cached)), default=0) + 1

    def place(self, worker: int) -> int:
        return self.places[worker] if self.places else 0

    def prefix_source(self, request: int, host: int) -> int | None:
        """Return the host from which a worker on `host` fetches a prefix before it computes this request, or None."""
        text = self.requests[request].text
        return 1 - host if self.hosts == 2 and text and text[0] in self.fetched else None


def _of_a_prefix(*requests: Request, slots: int, cached: str) -> Setup:
    return Setup(
        requests,
        slots,
        decoders=1,
        prefillers=0,
        places=(0,),
        cached=((1, cached),),
        fetched="a",
        attempts=1,
    )


SETUPS = {
    # One request and its next attempt. The world is so small that more faults can be explored.
    "one": Setup((Request("a"),), slots=3),
    # Two requests that share their first block.
    "handoff": Setup((Request("a"), Request("a")), slots=4),
    # One request without blocks, and one whose first token is its last and whose text may be cached completely.
    "edges": Setup((Request("", tail=0), Request("a", one_token=True)), slots=2),
    # Both requests run out of blocks when they decode. One is preempted, and reserves again with its next generation.
    "growth": Setup((Request("", growth=16), Request("", growth=16)), slots=3),
    # Two cache groups. One of them has a window, and decode gives back the blocks that the window has left.
    "window": Setup((Request("abc"), Request("a")), slots=9, layout=WITH_A_WINDOW),
    # Prefill on one host, decode on another.
    "between_hosts": Setup((Request("a"),), slots=3, decoders=1, prefillers=1, places=(0, 1), attempts=1),
    # Two requests that lack the same prefix, which another host has. Their worker computes prompts itself.
    "prefix": _of_a_prefix(Request("a"), Request("a"), slots=3, cached="a"),
    # One of the two requests lacks a shorter part of the prefix.
    "longer_prefix": _of_a_prefix(Request("ab"), Request("a"), slots=4, cached="ab"),
    # The source of the prefix has requests of its own, so its cached blocks may be evicted.
    "lost_prefix": Setup(
        (Request("a"), Request("b")),
        slots=2,
        decoders=2,
        prefillers=0,
        places=(0, 1),
        cached=((1, "a"),),
        fetched="a",
        attempts=1,
    ),
    # A request whose prefill worker reads an encoding. Its first token is its last, so that there is no handoff.
    "encoding": Setup((Request("", one_token=True, media="m"),), slots=3, decoders=1, prefillers=1, attempts=1),
    # Another request needs all blocks, so it evicts the encoding, or comes first.
    "evicted_encoding": Setup(
        (Request("", one_token=True, media="m"), Request("", tail=17, one_token=True)),
        slots=2,
        decoders=1,
        prefillers=1,
        attempts=1,
    ),
    # The source has one block, which the other request gets as soon as it is free. A reader may be too late.
    "too_late": Setup(
        (Request("a", tail=0), Request("b", tail=0)),
        slots=1,
        decoders=2,
        prefillers=1,
        places=(0, 1, 1),
        attempts=1,
    ),
}
