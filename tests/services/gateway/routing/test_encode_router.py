"""Where an encoding is computed or found."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.proto.fleet_pb2 import LoadReport
from paceline.services.common.registry import Member, Role, State
from paceline.services.gateway.routing.candidates import Candidate
from paceline.services.gateway.routing.encode_router import EncodeNeed, place_encoding


def worker(
    name: str,
    role: Role,
    host: str = "here",
    encodings: int = 0,
    running: int = 0,
    state: State = "ready",
    layout: str = "kv",
) -> Candidate:
    member = Member(name, role, 1, "", host, state, layout=layout, load=LoadReport(running=running))
    return Candidate(member, encodings=encodings)


READER = worker("p", "prefill")
FLEET = [READER, worker("d", "decode"), worker("p2", "prefill", "far")]


def placed(*more: Candidate, fleet: list[Candidate] = FLEET, **need: object) -> str | None:
    member = place_encoding(EncodeNeed(READER.member, **need), [*fleet, *more])  # type: ignore[arg-type]
    return member and member.worker_id


def test_without_encode_workers_the_reader_encodes() -> None:
    assert placed() == "p"


def test_the_encode_worker_with_the_fewest_encodings_is_taken() -> None:
    assert placed(worker("e1", "encode", encodings=2), worker("e2", "encode", "far", encodings=1)) == "e2"
    assert placed(worker("e1", "encode", running=3), worker("e2", "encode", encodings=2)) == "e2"
    assert placed(worker("e1", "encode", "far"), worker("e2", "encode")) == "e2", "the nearer one of two"


def test_a_host_that_has_the_encoding_comes_first() -> None:
    encoder = worker("e", "encode")
    assert placed(worker("e", "encode", "far"), hosts=frozenset({"here"})) == "p"
    assert placed(encoder, hosts=frozenset({"far"})) == "p2"
    assert placed(encoder, hosts=frozenset({"far"}), cut=frozenset({("far", "here")})) == "e"
    assert placed(encoder, hosts=frozenset({"far"}), failed=frozenset({"p2"})) == "e"


@pytest.mark.parametrize("field", [{"state": "draining"}, {"layout": "other"}, {"state": "starting"}])
def test_workers_that_cannot_encode_for_the_reader_are_left_out(field: dict[str, Any]) -> None:
    assert placed(worker("e", "encode", **field)) == "p"


def test_a_worker_that_computes_the_encoding_now_is_joined() -> None:
    encoders = [worker("e1", "encode"), worker("e2", "encode", encodings=5)]
    assert placed(*encoders, computing=frozenset({"e2"})) == "e2"
    assert placed(*encoders, computing=frozenset({"p2"})) == "p2"
    assert placed(*encoders, computing=frozenset({"e2"}), failed=frozenset({"e2"})) == "e1"


def test_who_has_failed_is_taken_last() -> None:
    assert placed(worker("e", "encode"), failed=frozenset({"e"})) == "p"
    assert placed(worker("e", "encode"), failed=frozenset({"p"})) == "e"


def test_who_has_refused_is_not_asked_again() -> None:
    assert placed(worker("e", "encode"), refused=frozenset({"e"})) == "p"
    assert placed(worker("e", "encode"), refused=frozenset({"e", "p"})) is None


def test_a_reader_that_drains_encodes_for_its_own_request() -> None:
    assert placed(fleet=[]) == "p"
    assert placed(fleet=[worker("p", "prefill", state="draining")]) == "p"
