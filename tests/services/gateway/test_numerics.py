"""A request that loses its worker goes on at one of the same numerics, or says that there is none."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.numerics import Numerics
from paceline.services.gateway.routing.candidates import Candidate, Need, Placement
from paceline.services.gateway.routing.router import place_computing, place_computing_in_turn, place_in_turn
from tests.services.gateway.api.operators.test_routes import metrics
from tests.services.gateway.conftest import Reader, Stack, StartStack, eventually
from tests.services.gateway.routing.test_router import NEED, member, placed
from tests.services.gateway.sequences.test_kinds import SCORING
from tests.services.gateway.sequences.test_traces import ended
from tests.services.gateway.toy_workers import TEXT

AVX2 = Numerics("avx2", "bfloat16", "none")
PORTABLE = Numerics("portable", "bfloat16", "none")


def test_who_computes_like_those_before_is_preferred_at_any_cost() -> None:
    other, same = member("d1", numerics=PORTABLE), member("d2", numerics=AVX2, running=7)
    far, near = member("p1", "prefill", numerics=AVX2, host_id="far", waiting=7), member("p2", "prefill")
    assert placed(Need(100, decoded_with=AVX2), other, same) == ("d2", None)
    assert placed(Need(100, computed_with=AVX2), other, far, near) == ("d1", "p1")
    assert placed(Need(100, decoded_with=AVX2, computed_with=AVX2), other, same, far, near) == ("d2", "p1")
    assert placed(NEED, other, same, far, near) == ("d1", "p2")


def test_a_decode_worker_alone_counts_as_the_one_that_computes() -> None:
    workers = member("d1", numerics=PORTABLE), member("d2", numerics=AVX2, running=7)
    assert placed(Need(100, computed_with=AVX2), *workers) == ("d2", None)
    assert placed(Need(100, computed_with=AVX2, decoded_with=PORTABLE), *workers) == ("d1", None)


def test_other_and_unknown_numerics_are_taken_where_there_are_no_others() -> None:
    need = Need(100, decoded_with=AVX2)
    assert placed(need, member("d", numerics=PORTABLE)) == ("d", None)
    assert placed(need, member("d1"), member("d2", numerics=AVX2, running=7)) == ("d2", None)
    assert placed(need, member("d")) == ("d", None)


def test_a_worker_of_other_numerics_is_better_than_one_that_failed_or_is_full() -> None:
    workers = member("d1", numerics=AVX2), member("d2", numerics=PORTABLE)
    assert placed(Need(100, decoded_with=AVX2, failed=frozenset({"d1"})), *workers) == ("d2", None)
    assert placed(Need(100, decoded_with=AVX2, refused=frozenset({"d1"})), *workers) == ("d2", None)


def test_the_same_numerics_are_preferred_in_turns_and_for_work_without_decoding() -> None:
    need = Need(100, computed_with=AVX2, decoded_with=AVX2)
    workers = [
        Candidate(member(f"{role[0]}{number}", role, numerics=numerics))
        for role in ("prefill", "decode")
        for number, numerics in enumerate((PORTABLE, AVX2, AVX2))
    ]
    ways = [place_in_turn(need, workers, turn) for turn in range(9)]
    assert {way.decode.worker_id for way in ways if way} == {"d1", "d2"}
    assert {way.prefill.worker_id for way in ways if way} <= {"p1", "p2"}
    assert place_computing(need, workers) == Placement(None, workers[1].member)
    assert [place_computing_in_turn(need, workers, turn).prefill.worker_id for turn in range(3)] == ["p1", "p2", "p1"]
    assert place_computing_in_turn(need, [], 0) is None


async def start(start_stack: StartStack, **numerics: Numerics | None) -> Stack:
    """Start a stack with decode workers d0, d1, … and prefill workers p0, p1, …, whose numerics these are."""
    stack = await start_stack(prefill=0, decode=0)
    for name, each in numerics.items():
        await stack.add("decode" if name[0] == "d" else "prefill", name, numerics=each)
    await eventually(stack.sees_all)
    return stack


async def attempts(stack: Stack, request_id: str) -> list[dict[str, Any]]:
    """Return the admissions of a request's attempts when it has ended."""
    (part,) = (await ended(stack, request_id))["parts"]
    return [attempt["admission"] for attempt in part["attempts"]]


async def changes(stack: Stack) -> float:
    return (await metrics(stack))["paceline:request_numerics_changes_total"]


@pytest.mark.parametrize("how", ["fails", "drains"])
async def test_the_same_numerics_are_preferred(start_stack: StartStack, how: str) -> None:
    stack = await start(start_stack, d0=AVX2, d1=PORTABLE, d2=AVX2, p0=AVX2)
    fleet = (await stack.http.get("/fleet")).json()["workers"]
    assert [worker["numerics"] for worker in fleet] == [str(each) for each in (AVX2, PORTABLE, AVX2, AVX2)]
    first = stack.workers["d0"]
    first.pause_after = 5
    reader = Reader(stack, max_tokens=40, extra_headers={"x-request-id": "r"})
    await eventually(lambda: reader.text == TEXT[:6])
    if how == "fails":
        await first.crash()
    else:
        first.state = "draining"
    assert await reader.task == TEXT[:40]
    admissions = await attempts(stack, "r")
    assert [each["decode"] for each in admissions] == [
        {"worker": name, "host": "host", "numerics": str(AVX2)} for name in ("d0", "d2")
    ]
    assert [each["numerics_changes"] for each in admissions] == [{}, {}]
    assert await changes(stack) == 0


@pytest.mark.parametrize(
    ("before", "now", "change"),
    [
        (AVX2, PORTABLE, {"decode": f"{AVX2} before, {PORTABLE} now"}),
        (AVX2, None, {"decode": f"{AVX2} before, unknown now"}),
        (None, PORTABLE, {}),
    ],
)
async def test_other_numerics_are_accepted_and_noted(
    start_stack: StartStack, before: Numerics | None, now: Numerics | None, change: dict[str, str]
) -> None:
    stack = await start(start_stack, d0=before, d1=now, p0=AVX2)
    stack.workers["d0"].fail_after = 4
    answer = await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0, request_id="r")
    assert answer.json()["choices"][0]["text"] == TEXT[:30]
    assert [each["numerics_changes"] for each in await attempts(stack, "r")] == [{}, change]
    assert await changes(stack) == bool(change)


async def test_a_prompt_is_computed_again_with_the_numerics_of_the_first_time(start_stack: StartStack) -> None:
    stack = await start(start_stack, d0=None, d1=None, p0=AVX2, p1=PORTABLE, p2=AVX2)
    stack.workers["d0"].pause_after = 5
    reader = Reader(stack, max_tokens=40, extra_headers={"x-request-id": "r"})
    await eventually(lambda: reader.text == TEXT[:6])
    for name in ("p0", "d0"):
        await stack.workers[name].crash()
    assert await reader.task == TEXT[:40]
    assert [each["prefill"]["worker"] for each in await attempts(stack, "r")] == ["p0", "p2"]
    assert await changes(stack) == 0


async def test_scoring_goes_on_with_the_same_numerics(start_stack: StartStack) -> None:
    stack = await start(start_stack, p0=AVX2, p1=PORTABLE, p2=AVX2)
    stack.workers["p0"].fail_after = 1
    await stack.post("/v1/completions", **SCORING, request_id="r")
    assert [each["prefill"]["worker"] for each in await attempts(stack, "r")] == ["p0", "p2"]


async def test_before_the_first_token_nothing_has_to_match(start_stack: StartStack) -> None:
    stack = await start(start_stack, d0=AVX2, d1=PORTABLE, p0=AVX2, p1=PORTABLE)
    stack.workers["p0"].fail_after = 0
    await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0, request_id="r")
    admissions = await attempts(stack, "r")
    assert [each["prefill"]["numerics"] for each in admissions] == [str(AVX2), str(PORTABLE)]
    assert [each["numerics_changes"] for each in admissions] == [{}, {}]
    assert await changes(stack) == 0
