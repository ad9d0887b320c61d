"""What each party believes, and what is on its way between them: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.types import Key

DECODE, PREFILL = "decode", "prefill"

Word = tuple[object, ...]
"""What is in a block: (group, hash) where it may be shared, else (request, attempt, group, block)."""


class Op(NamedTuple):
    """An operation on its way from a worker to the ledger of its host."""

    kind: str
    host: int
    session: int
    key: Key
    published: int = 0
    """For seal: tokens at the front that need no publishing."""
    another: bool = False
    """Whether its sender was given another prompt than decode."""
    context_hash: bytes = b""
    """For fill: names the prompt that was computed."""


class Late(NamedTuple):
    """An operation that its sender has given up, or that comes a second time."""

    op: Op
    again: bool
    """Whether it has been carried out already."""


JobId = tuple[str, str, int]
"""(role, request id, attempt)"""


class Job(NamedTuple):
    """One attempt on one worker: what that worker believes."""

    role: str
    host: int
    session: int
    request: int
    key: Key
    phase: str
    tables: tuple[tuple[int, ...], ...] = ()
    settled: int = 0
    """Tokens at the front whose blocks it will not write any more."""
    cancelled: bool = False
    lost: bool = False
    """Whether it was told that its lease had ended."""
    grown: bool = False
    alone: bool = False
    """Whether it was preempted, and computes its context itself."""
    reserved: bool = False
    """Whether it is a prefill worker's and has reserved blocks of its own host, from where they will be fetched."""
    another: bool = False
    """Whether it is a prefill worker's and was given another prompt than decode."""
    context_hash: bytes = b""
    """Names the prompt with which the blocks were filled that it has adopted."""
    fetch: str = ""
    """Whether its blocks come from another host: called; answered: all have come."""

    @property
    def id(self) -> JobId:
        return (self.role, self.key.request_id, self.key.attempt)

    @property
    def next_key(self) -> Key:
        return self.key._replace(generation=self.key.generation + 1)

    @property
    def touches(self) -> bool:
        """Whether its engine may be writing."""
        return self.phase in ("writing", "running", "extending", "stopping")

    @property
    def waits(self) -> bool:
        """Whether it has blocks that its engine has not got."""
        return self.phase in ("admitted", "adopting", "adopted") or (self.phase == "opening" and self.reserved)

    @property
    def renews(self) -> bool:
        """Whether its worker renews the lease."""
        return (self.touches or self.waits) and not self.lost and not (self.cancelled and self.phase == "adopting")


class Asked(NamedTuple):
    """A request as the gateway knows it."""

    life: int = 0
    """Grows when a new gateway gets the request again."""
    tries: int = 0
    failures: int = 0
    phase: str = "waiting"
    prefiller: int = -1
    opened: Key | None = None
    """Where its prefill worker has blocks of another host than decode."""
    filled: Key | None = None
    """Where its prefill worker has said that the blocks are complete."""

    @property
    def runs(self) -> bool:
        return self.phase in ("admitting", "prefilling", "decoding")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the source that may be read, as it is named to the reader."""

    group: int
    index: int
    slot: int
    hash: bytes
    digest: Word | None
    """What it contains when it is named."""


class Named(NamedTuple):
    """A message of the source."""

    blocks: tuple[Block, ...]
    last: bool
    """Whether these are all."""
    filled_tokens: int
    """That the source's lease contains."""
    context_hash: bytes
    """Names them, in the last message."""


class Transfer(NamedTuple):
    """A prompt, or a cached prefix, on its way between hosts: what the reader believes, what the source does, and the
    stream between."""

    request: int
    here: int
    """Host of the reader, which is kvtransfer of the decode worker's."""
    there: int
    """Host of the source, which is kvtransfer of the prefill worker's."""
    session: int
    """Of the worker that waits for it."""
    caller: JobId
    """That worker's job."""
    key: Key
    """Of the lease here."""
    source_key: Key
    """Of the lease there; of a prefix the same, and each end makes its own."""
    prefix: bool = False
    reader: str = "called"
    """called; waiting: for another that brings the same prefix; reading; filled: its answer is on the way; gone."""
    source: str = "gone"
    """exporting: it has been called; gone."""
    cut: bool = False
    """Whether the stream has broken, of which both sides are yet to learn."""
    tables: tuple[tuple[int, ...], ...] = ()
    """Of the lease here, as the three below."""
    filled_tokens: int = 0
    """That were here from the beginning."""
    come: frozenset[tuple[int, int]] = frozenset()
    """(group, block) of those that have been read."""
    stream: tuple[Named, ...] = ()
    adopted: Key | None = None
    """Under which the source has taken over the filled lease there, or holds what it had cached."""
    named: tuple[int, ...] = ()
    """By group, how far the source has named blocks."""
    named_all: bool = False

    @property
    def id(self) -> tuple[str, int]:
        return self.key[:2]
