"""What a world begins with: its requests, workers, blocks, and how much may go wrong in it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from dataclasses import dataclass

from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.lru import LRU
from paceline.core.kv_layout import BASE_TOKENS, GroupShape, KVGroup, KVLayout


def make_layout(*groups: tuple[int, int]) -> KVLayout:
    """Groups as (block_tokens, window)."""
    made = tuple(KVGroup(GroupShape(f"g{i}", (), 0, 0, window), tokens) for i, (tokens, window) in enumerate(groups))
    return KVLayout(made, itemsize=0, slot_bytes=4096, fingerprint="proof")


ONE_GROUP = make_layout((16, 0))
WITH_A_WINDOW = make_layout((16, 0), (32, 16))


@dataclass(frozen=True)
class Request:
    """What a client asks for."""

    text: str
    """The prompt's front, one letter for each 16 tokens. Equal beginnings have equal KV."""
    tail: int = 4
    """Tokens of the prompt behind it; with none and no text, the lease has no blocks at all."""
    growth: int = 0
    """Tokens that its decode worker asks room for only when it is there."""
    one_token: bool = False
    """Whether the prefill worker's token is the last one, so that nothing is handed over."""

    @property
    def context(self) -> int:
        return len(self.text) * BASE_TOKENS + self.tail

    @property
    def sealable(self) -> int:
        """Tokens at the front whose blocks can be shared."""
        return len(self.text) * BASE_TOKENS

    @property
    def reusable(self) -> int:
        """Links of the chain that can be found: the last token is always computed."""
        return min(len(self.text), max(0, self.context - 1) // BASE_TOKENS)

    @functools.cached_property
    def hashes(self) -> list[bytes]:
        return [hashlib.md5(self.text[: end + 1].encode()).digest() for end in range(len(self.text))]

    @functools.cached_property
    def name(self) -> bytes:
        """Of the whole prompt."""
        return hashlib.md5(f"{self.text}, {self.tail}".encode()).digest()

    @functools.cached_property
    def another(self) -> Request:
        """As long as this one, and with another text, where it has any."""
        return dataclasses.replace(self, text=self.text.upper())


@dataclass(frozen=True)
class Setup:
    requests: tuple[Request, ...]
    slots: int
    layout: KVLayout = ONE_GROUP
    decoders: int = 2
    prefillers: int = 2
    places: tuple[int, ...] = ()
    """The host of each worker, decode workers first; one host where it is empty."""
    cached: tuple[tuple[int, str], ...] = ()
    """(host, text) of what is cached from the beginning."""
    fetched: str = ""
    """Prompts that begin with one of these letters are believed to be cached on the other one of two hosts."""
    attempts: int = 2
    """Failed attempts after which the gateway gives a request up."""
    faults: int = 0
    """How often something may go wrong, in all."""
    policy: type[CachePolicy] = LRU
    """What chooses the blocks to evict."""
    kind: str = ""
    """The only thing that may go wrong, by the name of its move; anything where it is empty."""

    @property
    def hosts(self) -> int:
        return max((*self.places, *(host for host, _ in self.cached)), default=0) + 1

    def place(self, worker: int) -> int:
        return self.places[worker] if self.places else 0

    def prefix_source(self, request: int, host: int) -> int | None:
        """Host from which whoever computes this request's prompt on `host` brings over a prefix first."""
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
    # One request alone, and its next attempt: so small that more may go wrong.
    "one": Setup((Request("a"),), slots=3),
    # Two requests that share their first block.
    "handoff": Setup((Request("a"), Request("a")), slots=4),
    # One that needs no blocks, one whose first token is its last; the second may find all of its front cached.
    "edges": Setup((Request("", tail=0), Request("a", one_token=True)), slots=2),
    # Both run out of room when they decode: one is preempted, and reserves anew under its next generation.
    "growth": Setup((Request("", growth=16), Request("", growth=16)), slots=3),
    # Two cache groups, one of them with a window, whose blocks decode gives back.
    "window": Setup((Request("abc"), Request("a")), slots=9, layout=WITH_A_WINDOW),
    # Prefill on one host, decode on another one.
    "between_hosts": Setup((Request("a"),), slots=3, decoders=1, prefillers=1, places=(0, 1), attempts=1),
    # Two that lack the same prefix, which another host has. Their worker computes prompts itself.
    "prefix": _of_a_prefix(Request("a"), Request("a"), slots=3, cached="a"),
    # One of them lacks less of it.
    "longer_prefix": _of_a_prefix(Request("ab"), Request("a"), slots=4, cached="ab"),
    # A prefix's source has work, too: what it has cached may have to go.
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
    # The source has one block, which the other request gets as soon as it is free: a reader may come too late.
    "too_late": Setup(
        (Request("a", tail=0), Request("b", tail=0)),
        slots=1,
        decoders=2,
        prefillers=1,
        places=(0, 1, 1),
        attempts=1,
    ),
}
