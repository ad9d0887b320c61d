"""Where a request runs: a pure function of the request and of what is known about the fleet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.services.common.registry import Member

Link = tuple[str, str]
"""Hosts, from where to where KV blocks are moved."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a placement must satisfy."""

    context_tokens: int
    """Prompt and longest answer together."""
    refused: frozenset[str] = frozenset()
    """Workers that have just said that they are full: not asked again."""
    failed: frozenset[str] = frozenset()
    """Workers on which an earlier attempt failed: taken only where there is no other."""
    cut: frozenset[Link] = frozenset()
    """Over which blocks do not get through now."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that can be reached, and how many calls of this gateway it has not finished."""

    member: Member
    in_flight: int = 0
    unreported: int = 0
    """Those of them that the member's figures may not contain yet."""

    @property
    def load(self) -> float:
        # The figures are up to a second old; our own calls spread a burst that comes in between.
        member = self.member
        return (member.running + member.waiting + self.unreported) / max(member.max_seqs, 1)

    @property
    def has_room(self) -> bool:
        """As far as this gateway's own calls tell; the worker has the last word."""
        return self.in_flight < self.member.max_seqs


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an attempt runs. Without `prefill` the decode worker computes the prompt."""

    decode: Member
    prefill: Member | None


def place(need: Need, snapshot: Iterable[Candidate]) -> Placement | None:
    """The least loaded decode worker, and the least loaded prefill worker that can hand over to it: without moving
    bytes, where one on its host has room.

    A decode worker computes prompts itself only where there is no prefill worker for it at all. Where there are some,
    all full, the request waits for them, so that a burst of prompts does not slow down everybody's tokens.

    Returns None where nothing can take the request now.
    """
    fitting = [c for c in snapshot if c.member.state == "ready" and c.member.max_model_len >= need.context_tokens]
    prefills = [c for c in fitting if c.member.role == "prefill"]

    def rank(candidate: Candidate) -> tuple[bool, float, str]:
        # The id breaks ties, so that equal snapshots give equal placements.
        return candidate.member.worker_id in need.failed, candidate.load, candidate.member.worker_id

    choices: list[tuple[bool, Candidate, Candidate | None]] = []
    for decode in fitting:
        if decode.member.role != "decode" or decode.member.worker_id in need.refused:
            continue
        partners = [c for c in prefills if _can_hand_over(c.member, decode.member, need.cut)]
        open_ones = [c for c in partners if c.member.worker_id not in need.refused and c.has_room]
        near_ones = [c for c in open_ones if c.member.host_id == decode.member.host_id]
        if open_ones or not partners:
            choices.append((not partners, decode, min(near_ones or open_ones, key=rank, default=None)))
    if not choices:
        return None
    _, decode, prefill = min(choices, key=lambda choice: (choice[0], rank(choice[1])))
    return Placement(decode.member, prefill.member if prefill is not None else None)


def _can_hand_over(prefill: Member, decode: Member, cut: frozenset[Link]) -> bool:
    return prefill.layout == decode.layout and (prefill.host_id, decode.host_id) not in cut
