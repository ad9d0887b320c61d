"""A request that loses its worker goes on at one of the same numerics, and says so if there is none."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.numerics import Numerics
from tests.services.gateway.conftest import Reader, Stack, StartStack, eventually
from tests.services.gateway.test_kinds import SCORING
from tests.services.gateway.test_operations import metrics
from tests.services.gateway.test_traces import ended
from tests.services.gateway.toy_workers import TEXT

AVX2 = Numerics("avx2", "bfloat16", "none")
PORTABLE = Numerics("portable", "bfloat16", "none")


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
