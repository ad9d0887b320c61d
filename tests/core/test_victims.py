"""Which workers leave first: those that lose least."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.numerics import Numerics
from paceline.core.victims import REQUEST_TOKENS, Standing, loss, tokens_only_here, victims

AVX, AMX = Numerics("avx2", "bfloat16", "none"), Numerics("amx", "bfloat16", "none")


def worker(name: str, host: str = "a", role: str = "decode", **facts: object) -> Standing:
    return Standing(name, role, host, **{"numerics": AVX, **facts})  # type: ignore[arg-type]


def test_a_worker_that_is_starting_leaves_before_an_idle_one() -> None:
    fleet = [worker("idle"), worker("starting", is_ready=False, running=0), worker("busy", running=3)]
    assert victims(fleet, "decode", 9, {}) == ["starting", "idle", "busy"]


def test_of_equal_workers_the_youngest_leaves() -> None:
    assert victims([worker("a", epoch=1), worker("b", epoch=2)], "decode", 1, {}) == ["b"]


def test_queued_prompts_count_like_the_requests_that_they_outweigh() -> None:
    fleet = [worker("p", role="prefill", running=2), worker("q", role="prefill", queued_tokens=3 * REQUEST_TOKENS)]
    assert victims(fleet, "prefill", 1, {}) == ["p"]


def test_the_last_worker_of_a_host_keeps_what_only_its_host_has_cached() -> None:
    fleet = [worker("alone", "a"), worker("one", "b", running=1), worker("two", "b", running=1)]
    assert victims(fleet, "decode", 1, {"a": 10 * REQUEST_TOKENS}) == ["one"]
    assert victims(fleet, "decode", 1, {"a": REQUEST_TOKENS // 2}) == ["alone"]
    # A prefill worker on the same host still uses the cache, so it is not lost.
    fleet.append(worker("prefill", "a", "prefill"))
    assert victims(fleet, "decode", 1, {"a": 10 * REQUEST_TOKENS}) == ["alone"]


def test_after_a_victim_another_worker_may_be_the_last_of_its_host() -> None:
    fleet = [worker("a1", "a"), worker("a2", "a"), worker("b1", "b", running=1)]
    assert victims(fleet, "decode", 3, {"a": 1000}) == ["a1", "b1", "a2"]


def test_requests_stay_with_the_last_worker_of_their_numerics() -> None:
    fleet = [worker("last", running=1, numerics=AMX), worker("one", running=8), worker("two", running=8)]
    assert victims(fleet, "decode", 1, {}) == ["one"]
    idle = [replace(each, running=0) if each.worker_id == "last" else each for each in fleet]
    assert victims(idle, "decode", 1, {}) == ["last"]


def test_blocks_of_two_hosts_are_lost_with_neither() -> None:
    blocks = {"a": [(b"x", 16), (b"y", 16)], "b": [(b"y", 16)], "c": []}
    assert tokens_only_here(blocks) == {"a": 16, "b": 0, "c": 0}


workers = st.builds(
    Standing,
    worker_id=st.uuids().map(str),
    role=st.sampled_from(["prefill", "decode"]),
    host_id=st.sampled_from("ab"),
    is_ready=st.booleans(),
    running=st.integers(0, 5),
    queued_tokens=st.integers(0, 500),
    numerics=st.sampled_from([None, AVX, AMX]),
)


@given(st.lists(workers, max_size=8, unique_by=lambda each: each.worker_id), st.integers(0, 8))
def test_the_order_has_each_worker_of_the_role_once_and_no_ready_one_before_a_starting_one(
    fleet: list[Standing], count: int
) -> None:
    gone = victims(fleet, "decode", count, {"a": 100})
    of_role = {each.worker_id: each for each in fleet if each.role == "decode"}
    assert len(gone) == len(set(gone)) == min(count, len(of_role))
    ready = [of_role[name].is_ready for name in gone]
    assert ready == sorted(ready)
    assert gone == victims(fleet[::-1], "decode", count, {"a": 100})
    assert all(loss(each, fleet, {}) >= 0 for each in fleet)
