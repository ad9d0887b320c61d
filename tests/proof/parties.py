"""The state of each party, and messages on their way between parties, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.types import Key

DECODE, PREFILL = "decode", "prefill"
ENCODE, READ = "encode", "read"
"""Roles of jobs that have a lease of an encoding: to compute it, and to read it for a prefill worker's prompt."""

Word = tuple[object, ...]
"""Content of a block: (group, hash) if the block may be shared, else (request, attempt, group, block)."""


class Op(NamedTuple):
    """An operation on its way from a worker to the ledger of its host."""

    kind: str
    host: int
    session: int
    key: Key
    published: int = 0
    """For seal: number of tokens at the beginning whose blocks are published already."""
    another: bool = False
    """Whether the sender got another prompt than the decode worker."""
    context_hash: bytes = b""
    """For fill: name of the computed prompt."""


class Late(NamedTuple):
    """An operation that its sender has given up, or that arrives a second time."""

    op: Op
    again: bool
    """Whether the operation has been carried out already."""


JobId = tuple[str, str, int]
"""(role, request id, attempt)"""


class Job(NamedTuple):
    """One attempt on one worker, in the state that the worker knows."""

    role: str
    host: int
    session: int
    request: int
    key: Key
    phase: str
    tables: tuple[tuple[int, ...], ...] = ()
    settled: int = 0
    """Number of tokens at the beginning whose blocks the job does not write any more."""
    cancelled: bool = False
    lost: bool = False
    """Whether the worker knows that the lease has ended."""
    grown: bool = False
    alone: bool = False
    """Whether the decode worker computes the context itself, for example after a preemption."""
    reserved: bool = False
    """Whether this is a prefill job with blocks on its own host, from which the decode worker's host fetches them."""
    another: bool = False
    """Whether this is a prefill job that got another prompt than the decode worker."""
    context_hash: bytes = b""
    """Name of the prompt in the adopted blocks."""
    fetch: str = ""
    """State of the fetch from another host: empty if there is none; "called"; "answered" when all blocks are here."""

    rows: tuple[int, ...] = ()
    """Slots of the encoding that this prefill job reads."""

    @property
    def encoding(self) -> bool:
        """Whether the lease is of an encoding."""
        return self.role in (ENCODE, READ)

    @property
    def id(self) -> JobId:
        return (self.role, self.key.request_id, self.key.attempt)

    @property
    def next_key(self) -> Key:
        return self.key._replace(generation=self.key.generation + 1)

    @property
    def touches(self) -> bool:
        """Whether the engine may be writing to the blocks."""
        return self.phase in ("writing", "running", "extending", "stopping", "publishing", "holding")

    @property
    def waits(self) -> bool:
        """Whether the job has blocks that the engine does not use yet."""
        return self.phase in ("admitted", "adopting", "adopted") or (self.phase == "opening" and self.reserved)

    @property
    def renews(self) -> bool:
        """Whether the worker renews the lease."""
        return (self.touches or self.waits) and not self.lost and not (self.cancelled and self.phase == "adopting")


class Asked(NamedTuple):
    """A request as the gateway knows it."""

    life: int = 0
    """Number of gateway restarts after which the client has sent the request again."""
    tries: int = 0
    failures: int = 0
    phase: str = "waiting"
    prefiller: int = -1
    opened: Key | None = None
    """Key of the prefill worker's lease, if that is on another host than the decode worker."""
    filled: Key | None = None
    """Key of the filled lease, after the prefill worker has reported that the blocks are complete."""
    encoded: str = ""
    """State of the encoding: empty; "called" (a worker computes it); "told" (the prefill worker may read it)."""

    @property
    def runs(self) -> bool:
        return self.phase in ("admitting", "prefilling", "decoding")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the source that may be read, as the source names it to the reader."""

    group: int
    index: int
    slot: int
    hash: bytes
    digest: Word | None
    """Content of the block when it is named."""


class Named(NamedTuple):
    """A message of the source to the reader."""

    blocks: tuple[Block, ...]
    last: bool
    """Whether no more messages follow."""
    filled_tokens: int
    """Filled tokens of the source's lease, in the last message."""
    context_hash: bytes
    """Name of these tokens, in the last message."""


class Transfer(NamedTuple):
    """A transfer of a prompt or a cached prefix between hosts: the states of the reader and the source, and the stream
    between them."""

    request: int
    here: int
    """Host of the reader, the kvtransfer service of the decode worker's host."""
    there: int
    """Host of the source, the kvtransfer service of the prefill worker's host."""
    session: int
    """Session of the worker that waits for the transfer."""
    caller: JobId
    """Job of the worker that waits for the transfer."""
    key: Key
    """Key of the lease at the reader."""
    source_key: Key
    """Key of the lease at the source. For a prefix it equals `key`, and each end makes a lease of its own."""
    prefix: bool = False
    reader: str = "called"
    """State of the reader: called; waiting (for another transfer of the same prefix); reading; filled (its answer is on
    its way); gone."""
    source: str = "gone"
    """State of the source: exporting (it has been called); gone."""
    cut: bool = False
    """Whether the stream has broken. Each side learns of this later."""
    tables: tuple[tuple[int, ...], ...] = ()
    """Block tables of the lease at the reader."""
    filled_tokens: int = 0
    """Number of tokens that were at the reader from the beginning."""
    come: frozenset[tuple[int, int]] = frozenset()
    """(group, block) of each block that has been read."""
    stream: tuple[Named, ...] = ()
    adopted: Key | None = None
    """Key with which the source has adopted the filled lease, or has leased its cached blocks."""
    named: tuple[int, ...] = ()
    """Number of blocks that the source has passed, by group."""
    named_all: bool = False

    @property
    def id(self) -> tuple[str, int]:
        return self.key[:2]
