"""The choice of a worker for the encoding of a piece of media. Pure functions of a snapshot of the fleet."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.core.media import MediaSpan
from paceline.services.common.registry import Member
from paceline.services.gateway.routing.candidates import Candidate, Link
from paceline.services.gateway.routing.prefix_index import PrefixIndex

WORKERS = ("encode", "prefill", "decode")
"""Roles of workers that can compute encodings."""


@dataclass(frozen=True, slots=True)
class EncodeNeed:
    """The facts about an encoding that its placement depends on."""

    reader: Member
    """The worker that computes the prompt and reads the encoding."""
    hosts: frozenset[str] = frozenset()
    """Ids of hosts that have cached the encoding. It is a hint and may be wrong."""
    computing: frozenset[str] = frozenset()
    """Ids of workers that are computing the encoding for another request now."""
    refused: frozenset[str] = frozenset()
    """Ids of workers that have just refused this encoding. They are not asked again for now."""
    failed: frozenset[str] = frozenset()
    """Ids of workers on which an earlier attempt failed. They are used only if there is no other worker."""
    cut: frozenset[Link] = frozenset()
    """Links on which transfers failed recently."""

    def is_known_to(self, member: Member) -> bool:
        """Return whether a worker has the encoding cached or is computing it, so that it needs no encoder input."""
        return member.host_id in self.hosts or member.worker_id in self.computing


def place_encoding(need: EncodeNeed, snapshot: Iterable[Candidate]) -> Member | None:
    """Return the worker to ask for an encoding; None if no worker is left that may be asked.

    A worker that has the encoding or is computing it is preferred, and among such workers one on the reader's own host.
    Otherwise the encode worker with the fewest encodings computes it. If there is no encode worker, the reader itself
    does.
    """

    def rank(candidate: Candidate) -> tuple[object, ...]:
        member = candidate.member
        is_here, is_reader = member.host_id == need.reader.host_id, member.worker_id == need.reader.worker_id
        return (
            member.worker_id in need.failed,
            not need.is_known_to(member),
            need.is_known_to(member) and not is_here,
            member.role != "encode",
            not is_reader,
            max(candidate.encodings, member.load.running + member.load.waiting) if member.role == "encode" else 0,
            not is_here,
            member.worker_id,
        )

    best = min((each for each in snapshot if _may_encode(need, each.member)), key=rank, default=None)
    if best is not None:
        return best.member
    return None if need.reader.worker_id in need.refused else need.reader


def _may_encode(need: EncodeNeed, member: Member) -> bool:
    if member.worker_id in need.refused or member.role not in WORKERS or member.layout != need.reader.layout:
        return False
    if member.worker_id == need.reader.worker_id:
        return True
    is_reachable = member.host_id == need.reader.host_id or (member.host_id, need.reader.host_id) not in need.cut
    return member.state == "ready" and is_reachable and (member.role == "encode" or need.is_known_to(member))


class EncodingIndex:
    """An index of the hosts and workers that have or compute an encoding. It is a hint and may be wrong.

    Args:
        prefixes: the cached blocks of all hosts.
    """

    def __init__(self, prefixes: PrefixIndex) -> None:
        self._prefixes = prefixes
        self._computing: dict[tuple[str, bytes], Counter[str]] = {}
        """Ids of the workers that have been asked for an encoding, by cache salt and digest."""

    def hosts(self, span: MediaSpan, cache_salt: str) -> frozenset[str]:
        """Return the ids of hosts that have cached the encoding of a span."""
        return frozenset(self._prefixes.encoding_hosts(span.digest, span.length, cache_salt))

    def workers(self, span: MediaSpan, cache_salt: str) -> frozenset[str]:
        """Return the ids of workers that compute the encoding of a span for this gateway now."""
        return frozenset(self._computing.get((cache_salt, span.digest), ()))

    @contextlib.contextmanager
    def computing(self, span: MediaSpan, cache_salt: str, worker_id: str) -> Iterator[None]:
        """Note, while the context is open, that a worker computes an encoding. Other requests for the same encoding are
        then sent to this worker, where they wait for the result."""
        name = (cache_salt, span.digest)
        workers = self._computing.setdefault(name, Counter())
        workers[worker_id] += 1
        try:
            yield
        finally:
            workers[worker_id] -= 1
            if not workers[worker_id]:
                del workers[worker_id]
            if not workers:
                del self._computing[name]
