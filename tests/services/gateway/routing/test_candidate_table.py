"""The table's promise: `place` chooses from its nominees what it would choose from all candidates."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.numerics import Numerics
from paceline.proto.fleet_pb2 import AdapterReport, LoadReport
from paceline.services.common.registry import Member
from paceline.services.gateway.queueing.admission_control import are_fed
from paceline.services.gateway.routing.candidate_table import CandidateTable
from paceline.services.gateway.routing.candidates import Candidate, Need
from paceline.services.gateway.routing.router import place

HOSTS = ["h1", "h2", "h3", "h4"]
NAMES = [f"{letter}{number}" for letter in "abcd" for number in range(4)]
NUMERICS = [None, Numerics("avx2", "bfloat16", "none", "native"), Numerics("avx512", "bfloat16", "none", "native")]

members = st.builds(
    Member,
    worker_id=st.sampled_from(NAMES),
    role=st.sampled_from(["prefill", "decode", "decode", "prefill", "encode"]),
    epoch=st.just(1),
    address=st.just(""),
    host_id=st.sampled_from(HOSTS),
    state=st.sampled_from(["ready", "ready", "ready", "ready", "draining"]),
    layout=st.sampled_from(["m", "m", "m", "other"]),
    max_model_len=st.sampled_from([50, 1000, 1000, 1000]),
    max_seqs=st.sampled_from([4, 8]),
    numerics=st.sampled_from(NUMERICS),
    weights=st.sampled_from(["", "w", "w", "v"]),
    load=st.builds(
        LoadReport,
        running=st.integers(0, 8),
        waiting=st.sampled_from([0, 0, 1]),
        queued_tokens=st.sampled_from([0, 0, 10, 500, 3000]),
        prefill_tokens_per_second=st.sampled_from([0.0, 1000.0, 1000.0, 900.1, 1103.7]),
    ),
    lora=st.builds(AdapterReport, miss_seconds=st.sampled_from([0.0, 0.07, 1.3])),
)
candidates = st.builds(
    Candidate,
    members,
    in_flight=st.integers(0, 5),
    unreported=st.sampled_from([0, 0, 1]),
    unreported_tokens=st.sampled_from([0.0, 7.3, -3.0]),
    recent_tokens=st.sampled_from([0.0, 0.0, 100.0, 77.7]),
    fetch_tokens_per_second=st.sampled_from([0.0, 0.0, 20_000.0, 1234.5]),
    adapters=st.frozensets(st.sampled_from([1, 2])),
)
fleets = st.lists(candidates, max_size=16, unique_by=lambda candidate: candidate.member.worker_id)
links = st.frozensets(st.sampled_from([("h1", "h2"), ("h2", "h1"), ("h3", "h2")]), max_size=2)
needs = st.builds(
    Need,
    st.just(100),
    prompt_tokens=st.integers(1, 4000),
    cached=st.dictionaries(st.sampled_from([*HOSTS, "h5"]), st.sampled_from([0, 16, 512, 3999])),
    layouts=st.dictionaries(st.sampled_from(HOSTS), st.sampled_from(["m", "other"]), max_size=2),
    refused=st.frozensets(st.sampled_from(NAMES), max_size=2),
    failed=st.frozensets(st.sampled_from(NAMES), max_size=2),
    computed_with=st.sampled_from(NUMERICS),
    decoded_with=st.sampled_from(NUMERICS),
    weights=st.sampled_from(["", "", "w"]),
    cut=st.one_of(st.just(frozenset()), links),
    home=st.sampled_from(["", *HOSTS, "h5"]),
    local_tokens=st.sampled_from([0, 64, 4000]),
    adapter=st.sampled_from([0, 1, 2, 3]),
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def table_of(fleet: list[Candidate], clock: Clock | None = None) -> CandidateTable:
    table = CandidateTable(half_life=10.0, clock=clock or Clock())
    for candidate in fleet:
        table.put(candidate)
    return table


@settings(max_examples=200)
@given(needs, fleets, st.integers(0, 15))
def test_the_nominees_have_the_best_placement(need: Need, fleet: list[Candidate], later: int) -> None:
    clock = Clock()
    table = table_of(fleet[:8], clock)
    clock.now = float(later)
    for candidate in fleet[8:]:
        table.put(candidate)
    assert place(need, table) == place(need, list(table))


@given(needs, fleets)
def test_it_finds_out_quickly_whether_all_have_enough_prompts(need: Need, fleet: list[Candidate]) -> None:
    assert are_fed(need, table_of(fleet)) == are_fed(need, fleet)


@given(needs, fleets, fleets, st.lists(st.sampled_from(NAMES)))
def test_it_can_be_changed(need: Need, before: list[Candidate], fleet: list[Candidate], gone: list[str]) -> None:
    table = table_of(before)
    for candidate in fleet:
        table.put(candidate)
    for name in gone:
        table.remove(name)
    left = {candidate.member.worker_id: candidate for candidate in (*before, *fleet)}
    left = {name: candidate for name, candidate in left.items() if name not in gone}
    assert list(table) == [left[name] for name in sorted(left)]
    assert len(table) == len(left)
    assert place(need, table) == place(need, list(left.values()))


@given(needs, needs, fleets)
def test_requests_of_different_adapters_follow_each_other(first: Need, then: Need, fleet: list[Candidate]) -> None:
    table = table_of(fleet[:8])
    place(first, table)
    for candidate in fleet[8:]:
        table.put(candidate)
    assert place(then, table) == place(then, list(table))


def test_the_only_worker_with_the_adapter_is_found() -> None:
    names = ["p", *(f"d{number}" for number in range(8))]
    lora = AdapterReport(miss_seconds=1.0)
    members = [
        Member(
            name,
            "prefill" if name == "p" else "decode",
            1,
            "",
            "h1",
            max_model_len=100,
            max_seqs=4,
            state="ready",
            lora=lora,
        )
        for name in names
    ]
    adapters = {"p": frozenset([5]), "d7": frozenset([5])}
    fleet = [Candidate(member, adapters=adapters.get(member.worker_id, frozenset())) for member in members]
    placement = place(Need(10, prompt_tokens=10, adapter=5), table_of(fleet))
    assert placement is not None
    assert placement.decode is not None
    assert placement.decode.worker_id == "d7"


def test_recent_tokens_are_those_of_now() -> None:
    clock = Clock()
    member = Member("p", "prefill", 1, "", "h1", max_model_len=100, max_seqs=1)
    table = table_of([Candidate(member, recent_tokens=80.0)], clock)
    clock.now = 20.0
    (candidate,) = table
    assert candidate.recent_tokens == pytest.approx(20.0)


def test_few_of_a_large_fleet_are_nominated() -> None:
    chance = random.Random(1)
    fleet = []
    for number in range(400):
        load = LoadReport(
            running=chance.randrange(32),
            queued_tokens=chance.randrange(5000),
            prefill_tokens_per_second=1000 + chance.random(),
        )
        role = "prefill" if number % 2 else "decode"
        member = Member(f"w{number:03}", role, 1, "", f"h{number // 8}", max_model_len=9999, max_seqs=32, load=load)
        fleet.append(Candidate(member))
    need = Need(1000, prompt_tokens=2000, cached={f"h{number}": 512 * (number % 3) for number in range(50)})
    table = table_of(fleet)
    assert place(need, table) == place(need, fleet)
    assert len(table.nominees(need)) < 30
