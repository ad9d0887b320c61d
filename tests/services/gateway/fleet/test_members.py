from __future__ import annotations

import pytest

from paceline.proto.fleet_pb2 import PlanReport
from paceline.services.common.credentials import Credentials
from paceline.services.common.registry import Member, Role
from paceline.services.gateway.fleet.members import FleetSummary, facts_of
from paceline.services.gateway.fleet.remote_worker import RemoteWorker


def worker(role: Role, *, set_aside: bool = False, refuses_us: bool = False, **options: object) -> RemoteWorker:
    values = {"model": "m", "max_model_len": 512, **options}
    found = RemoteWorker(Member(role, role, 1, "127.0.0.1:1", "h", **values), Credentials())  # type: ignore[arg-type]
    found.set_aside, found.refuses_us = set_aside, refuses_us
    return found


def summary(*workers: RemoteWorker) -> FleetSummary:
    return FleetSummary.of(workers, "m")


NOTHING = FleetSummary(0, 0, False, 0, False, False, False)


def test_an_empty_fleet_has_nothing() -> None:
    assert summary() == NOTHING


def test_the_longest_context_counts_of_each_role() -> None:
    both = summary(worker("decode"), worker("decode", max_model_len=1024), worker("prefill", max_model_len=2048))
    assert (both.max_model_len, both.max_computing_len, both.has_decode_worker) == (1024, 2048, True)
    alone = summary(worker("decode"))
    assert (alone.max_model_len, alone.max_computing_len) == (512, 512)
    pool = summary(worker("pool", max_model_len=256), worker("pool"))
    assert (pool.max_model_len, pool.max_computing_len, pool.computing_workers) == (0, 512, 2)


@pytest.mark.parametrize(
    "other",
    [{"model": "another"}, {"refuses_us": True}, {"state": "draining"}],
    ids=["model", "refuses us", "draining"],
)
def test_who_takes_no_requests_does_not_count(other: dict[str, object]) -> None:
    assert summary(worker("decode", **other), worker("encode"), worker("standby")) == NOTHING  # type: ignore[arg-type]


def test_who_is_set_aside_may_come_back() -> None:
    found = summary(worker("decode", set_aside=True))
    assert (found.max_model_len, found.has_decode_worker) == (512, False)
    found = summary(worker("prefill", set_aside=True), worker("decode"))
    assert (found.has_computing_worker, found.has_decode_worker) == (False, True)


def test_a_starting_worker_is_not_ready() -> None:
    assert summary(worker("prefill", state="starting"), worker("decode", state="starting")) == NOTHING


@pytest.mark.parametrize(
    ("plan", "may_be_empty"),
    [
        ({"leads": True, "may_be_empty": ["decode"]}, True),
        ({"leads": True, "may_be_empty": ["prefill"]}, False),
        ({"leads": False, "may_be_empty": ["decode"]}, False),
        ({"leads": True, "may_be_empty": ["decode"], "advisory": True}, False),
    ],
)
def test_a_planner_that_acts_may_leave_no_decode_worker(plan: dict[str, object], may_be_empty: bool) -> None:
    planner = worker("planner", plan=PlanReport(**plan))  # type: ignore[arg-type]
    found = summary(planner)
    assert (found.has_planner, found.may_be_empty) == (True, may_be_empty)
    planner.set_aside = True
    assert summary(planner) == NOTHING


def test_a_plan_is_a_fact_and_a_load_is_none() -> None:
    planner, decode = worker("planner"), worker("decode")
    assert facts_of(planner.member) != facts_of(worker("planner", plan=PlanReport(leads=True)).member)
    assert facts_of(decode.member) == facts_of(worker("decode", max_seqs=7).member)
    assert facts_of(decode.member) != facts_of(worker("decode", state="draining").member)
