"""An answer that has begun goes on only at workers with the same weights. New requests go to any."""

from __future__ import annotations

import pytest
from openai import APIError

from paceline.services.gateway.routing.candidates import Candidate, Need
from paceline.services.gateway.routing.router import place_computing, place_computing_in_turn, place_in_turn
from tests.services.gateway.conftest import Reader, Stack, StartStack, eventually
from tests.services.gateway.routing.test_router import NEED, member, placed
from tests.services.gateway.test_numerics import attempts
from tests.services.gateway.test_worker_states import is_draining
from tests.services.gateway.toy_workers import TEXT

OLD, NEW = "old", "new"


def test_workers_with_other_weights_are_no_candidates() -> None:
    workers = member("d1", weights=NEW), member("d2", weights=OLD, running=7), member("p1", "prefill", weights=NEW)
    assert placed(NEED, *workers) == ("d1", "p1")
    assert placed(Need(100, weights=OLD), *workers) == ("d2", None)
    assert placed(Need(100, weights="older"), *workers) is None


def test_in_turns_and_without_decoding_weights_count_too() -> None:
    need = Need(100, weights=OLD)
    workers = [
        Candidate(member(f"{role[0]}{number}", role, weights=weights))
        for role in ("prefill", "decode")
        for number, weights in enumerate((NEW, OLD, NEW))
    ]
    ways = [place_in_turn(need, workers, turn) for turn in range(4)]
    assert {(way.decode.worker_id, way.prefill.worker_id) for way in ways if way} == {("d1", "p1")}
    assert place_computing(need, workers).prefill.worker_id == "p1"
    assert {place_computing_in_turn(need, workers, turn).prefill.worker_id for turn in range(4)} == {"p1"}


@pytest.mark.parametrize(("before", "now"), [("", NEW), (OLD, "")])
def test_unknown_weights_of_an_earlier_release_cannot_be_compared(before: str, now: str) -> None:
    assert placed(Need(100, weights=before), member("d", weights=now)) == ("d", None)


async def begin(start_stack: StartStack) -> tuple[Stack, Reader]:
    """Return a stack of workers with the old weights, and a client that has got five tokens from them."""
    stack = await start_stack(prefill=0, decode=0, queue_seconds=1)
    await add(stack, OLD, "p0", "d0")
    stack.workers["d0"].pause_after = 5
    reader = Reader(stack, max_tokens=40, extra_headers={"x-request-id": "r"})
    await eventually(lambda: reader.text == TEXT[:6])
    return stack, reader


async def add(stack: Stack, weights: str, *names: str) -> None:
    for name in names:
        await stack.add("decode" if name[0] == "d" else "prefill", name, weights=weights)
    await eventually(stack.sees_all)


@pytest.mark.parametrize("how", ["fails", "drains"])
async def test_an_answer_goes_on_with_its_weights(start_stack: StartStack, how: str) -> None:
    stack, reader = await begin(start_stack)
    await add(stack, NEW, "d1", "p1")
    await add(stack, OLD, "d2")
    if how == "fails":
        await stack.workers["d0"].crash()
    else:
        stack.workers["d0"].state = "draining"
    assert await reader.task == TEXT[:40]
    assert [each["decode"]["worker"] for each in await attempts(stack, "r")] == ["d0", "d2"]


async def test_an_answer_whose_weights_have_gone_is_an_error_and_new_requests_are_served(
    start_stack: StartStack,
) -> None:
    stack, reader = await begin(start_stack)
    await add(stack, NEW, "d1", "p1")
    for name in ("d0", "p0"):
        await stack.workers[name].crash()
    with pytest.raises(APIError, match="no worker has the weights that began its answer: the model has been replaced"):
        await reader.task
    answer = await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0)
    assert answer.json()["choices"][0]["text"] == TEXT[:30]


async def test_a_sequence_stays_at_a_draining_worker_if_only_others_have_its_place(start_stack: StartStack) -> None:
    stack, reader = await begin(start_stack)
    await add(stack, NEW, "d1", "p1")
    first = stack.workers["d0"]
    first.state = "draining"
    await eventually(lambda: is_draining(stack, first))
    first.resume.set()
    assert await reader.task == TEXT[:40]
    assert [each["decode"]["worker"] for each in await attempts(stack, "r")] == ["d0"]


async def test_before_the_first_token_any_weights_will_do(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=0)
    await add(stack, OLD, "d0", "p0")
    await add(stack, NEW, "d1", "p1")
    stack.workers["p0"].fail_after = 0
    answer = await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0)
    assert answer.json()["choices"][0]["text"] == TEXT[:30]
