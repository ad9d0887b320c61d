"""Where a request runs: a pure function of the request and of what is known about the fleet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.services.common.registry import Member


@dataclass(frozen=True, slots=True)
class Need:
    """What a placement must satisfy."""

    context_tokens: int
    """Prompt and longest answer together."""
    refused: frozenset[str] = frozenset()
    """Workers that have just said that they are full: not asked again."""
    failed: frozenset[str] = frozenset()
    """Workers on which an earlier attempt failed: taken only where there is no other."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that can be reached, and how many calls of this gateway it is serving now."""

    member: Member
    in_flight: int = 0

    @property
    def load(self) -> float:
        # The heartbeat's figures are up to a second old; our own calls spread a burst that comes in between.
        member = self.member
        return (member.running + member.waiting + self.in_flight) / max(member.max_seqs, 1)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an attempt runs. Without `prefill` the decode worker computes the prompt."""

    decode: Member
    prefill: Member | None


def place(need: Need, snapshot: Iterable[Candidate]) -> Placement | None:
    """The least loaded decode worker, and the least loaded prefill worker that hands over to it without moving bytes.

    Returns None where no decode worker can take the request.
    """
    usable = [c for c in snapshot if c.member.state == "ready" and c.member.worker_id not in need.refused]
    fitting = [c for c in usable if c.member.max_model_len >= need.context_tokens]
    decode = _least_loaded((c for c in fitting if c.member.role == "decode"), need.failed)
    if decode is None:
        return None
    prefill = _least_loaded(
        (c for c in fitting if c.member.role == "prefill" and _can_hand_over(c.member, decode)), need.failed
    )
    return Placement(decode, prefill)


def _can_hand_over(prefill: Member, decode: Member) -> bool:
    return prefill.host_id == decode.host_id and prefill.model == decode.model


def _least_loaded(candidates: Iterable[Candidate], failed: frozenset[str]) -> Member | None:
    # The id breaks ties, so that equal snapshots give equal placements.
    best = min(candidates, key=lambda c: (c.member.worker_id in failed, c.load, c.member.worker_id), default=None)
    return None if best is None else best.member
