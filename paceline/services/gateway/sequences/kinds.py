"""Kinds of work: how each one is placed and run. A new kind needs an entry in `KINDS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from paceline.proto import common_pb2
from paceline.services.gateway.routing.candidates import Candidate, Need, Placement
from paceline.services.gateway.routing.router import place, place_computing, place_computing_in_turn, place_in_turn
from paceline.services.gateway.sequences.attempt import Attempt
from paceline.services.gateway.sequences.compute_attempt import ComputeAttempt

Kind: TypeAlias = common_pb2.WorkKind.ValueType
AnyAttempt = Attempt | ComputeAttempt


@dataclass(frozen=True, slots=True)
class KindOfWork:
    """The treatment of one kind of work by the gateway."""

    place: Callable[[Need, Iterable[Candidate]], Placement | None]
    """A function that returns the cheapest placement."""
    place_in_turn: Callable[[Need, Iterable[Candidate], int], Placement | None]
    """A function that returns placements in rotation; its last argument is the number of the turn."""
    attempt: type[Attempt] | type[ComputeAttempt]
    decodes: bool
    """Whether a decode worker is needed."""


KINDS: dict[Kind, KindOfWork] = {
    common_pb2.WORK_KIND_GENERATE: KindOfWork(place, place_in_turn, Attempt, decodes=True),
    common_pb2.WORK_KIND_SCORE: KindOfWork(place_computing, place_computing_in_turn, ComputeAttempt, decodes=False),
}
