"""The process that tries constraints: what it lets pass, what ends a trial, and what its own end costs."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError, InvalidRequestError
from paceline.core.grammar import compile_grammar
from paceline.core.types import Constraint, ConstraintKind
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.fair_pool import OwnerTurns
from paceline.services.gateway.planning.constraints import compiler
from paceline.services.gateway.planning.constraints.compiler import KnownOutcomes
from paceline.services.gateway.planning.constraints.fields import ConstraintFields, WantedConstraint
from paceline.services.gateway.planning.constraints.trial import fault, read_outcome
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.core.json_grammar.matching import allows
from tests.services.gateway.planning.constraints.desk import Desk, children, is_running, object_schema, until

PREPARE, LAUNCH = Gateway.prepare, compiler.launch
"""The functions themselves, which the tests of gateways replace."""


def constraint(size: int) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, "x" * size, frozenset({1}))


def test_an_outcome_is_its_owner_s_alone() -> None:
    known, error = KnownOutcomes(1 << 20), InvalidRequestError("wrong", "tools")
    known.add("a", b"1", error)
    known.add("a", b"2", None)
    assert known.find("a", b"1") == (error,)
    assert known.find("a", b"2") == (None,)
    assert known.find("b", b"1") is None
    assert known.find("a", b"3") is None


def test_the_owner_with_the_most_bytes_loses_its_oldest_outcomes() -> None:
    known = KnownOutcomes(40_000)
    known.add("small", b"0", constraint(1000))
    for number in range(9):
        known.add("large", bytes([number]), constraint(8000))
        known.find("large", b"\0")
    kept = [number for number in range(9) if known.find("large", bytes([number]))]
    assert kept == [0, 6, 7, 8]  # the first one was in use
    assert known.find("small", b"0")


def test_one_outcome_may_be_too_large() -> None:
    known = KnownOutcomes(10_000)
    known.add("a", b"0", constraint(20_000))
    assert known.find("a", b"0") is None
    known.add("a", b"1", constraint(10))
    assert known.find("a", b"1")


async def test_a_constraint_comes_with_the_grammar_that_a_worker_compiles(desk: Desk) -> None:
    made = await desk.make(response_format={"type": "json_object"}, tools=None)
    assert made is not None
    assert (made.place, made.end_token_ids) == ("response_format", desk.tokenizer.eos_token_ids)
    assert made.grammar != made.text
    library = LLTokenizer(str(desk.folder / "tokenizer.json"), eos_token=sorted(made.end_token_ids))
    matcher = compile_grammar(made.grammar, library, made.kind)
    assert [allows(matcher, text) for text in ('{"a": [1]}', "[1]", "{")] == [True, False, False]


@pytest.mark.parametrize(
    ("fields", "place", "words"),
    [
        ({"guided_regex": "("}, "guided_regex", "cannot be read"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "no rule defines"),
        ({"guided_json": "{"}, "guided_json", "not a JSON schema"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_regex", "set only one of them"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
    ],
)
async def test_an_error_names_its_field(desk: Desk, fields: dict[str, Any], place: str, words: str) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidRequestError, match=words) as error:
            await desk.make(**fields)
        assert error.value.param == place
    assert desk.compiler.trials == 1


async def test_outcomes_are_remembered_for_their_owner(desk: Desk) -> None:
    one = {"guided_choice": ["a", "b"]}
    made = await asyncio.gather(*(desk.make("x", **one) for _ in range(3)))
    assert made[0] is not None
    assert made[1:] == made[:2]
    assert desk.compiler.trials == 1
    await desk.make("x", **one)
    assert desk.compiler.trials == 1
    await desk.make("y", **one)
    await desk.make("x", guided_choice=["a", "c"])
    assert desk.compiler.trials == 3


async def test_a_trial_that_needs_too_much_memory_is_ended_and_remembered(folder: Path) -> None:
    desk = Desk(folder, constraint_memory="2MiB")
    try:
        large = object_schema(1000)
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="takes more than 2 s or 2 MiB; make it smaller") as error:
                await desk.make(**large)
            assert error.value.param == "response_format.json_schema.schema"
        assert desk.compiler.trials == 1
        assert await desk.make(guided_regex="a")
    finally:
        await desk.compiler.close()


async def test_a_trial_that_takes_too_long_is_ended(folder: Path) -> None:
    desk = Desk(folder, constraint_seconds=1, constraint_memory="4GiB")
    schema = object_schema(9000)["response_format"]["json_schema"]["schema"]
    # One of them takes about a second on a fast machine.
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(4)]
    try:
        with pytest.raises(InvalidRequestError, match="takes more than 1 s"):
            await desk.make(tools=tools, tool_choice="required")
        assert await desk.make(guided_regex="a")
    finally:
        await desk.compiler.close()


async def test_a_trial_on_a_busy_host_is_nobody_s_fault(folder: Path) -> None:
    desk = Desk(folder)
    desk.give(seconds=0.05)
    try:
        for trials in (1, 2):
            with pytest.raises(BusyError, match="too busy to compile"):
                await desk.make(**object_schema(1000))
            assert desk.compiler.trials == trials  # it is not remembered
    finally:
        await desk.compiler.close()


async def test_a_trial_that_the_system_ends_is_nobody_s_fault(desk: Desk) -> None:
    pid = desk.compiler.pid
    assert pid is not None
    for trials in (1, 2):
        await until(lambda: not children(pid))
        trial = asyncio.create_task(desk.make(**object_schema(4000)))
        await until(lambda: children(pid))
        (child,) = children(pid)
        os.kill(child, signal.SIGKILL)  # as the system does if the host's memory is full
        with pytest.raises(BusyError, match="too busy to compile"):
            await trial
        assert desk.compiler.trials == trials  # it is not remembered


async def test_a_process_that_hangs_is_started_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    first = desk.compiler.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    monkeypatch.setattr(compiler, "ANSWER_SECONDS", 1 - desk.compiler._limits.seconds)
    async with asyncio.timeout(60):
        assert await desk.make(guided_regex="a")
    assert desk.compiler.pid not in (None, first)


async def test_a_wait_for_a_trial_has_an_end(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(compiler, "MAX_WAITING", 1)
    turns = OwnerTurns(1)
    monkeypatch.setattr(desk.compiler, "_turns", turns)
    await turns.take("a")
    with pytest.raises(BusyError, match="other constraints are being compiled"):
        await desk.make("b", guided_choice=["waits"])
    waiting = asyncio.create_task(turns.take("b"))
    await asyncio.sleep(0)
    with pytest.raises(BusyError, match="too many new constraints of this key"):
        await desk.make("b", guided_choice=["is one too many"])
    turns.give_back("a")
    await waiting
    turns.give_back("b")
    assert await desk.make("b", guided_choice=["goes on"]) is not None


def test_a_bug_in_a_trial_does_not_pass_for_a_large_constraint() -> None:
    with pytest.raises(KeyError) as caught:
        raise KeyError("x")
    outcome = fault(caught.value)
    with pytest.raises(RuntimeError, match=r"KeyError: 'x' \(test_a_bug"):
        read_outcome(outcome, frozenset())


async def test_a_trial_that_fails_unexpectedly_is_told_and_not_remembered(desk: Desk) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ValidationError"):
            await desk.compiler.make(0, WantedConstraint(b'{"budget": "x"}', b"1" * 32, "tools"), "a")


async def test_the_end_of_the_process_is_no_outage(desk: Desk) -> None:
    assert await desk.make(guided_regex="a")
    first = desk.compiler.pid
    assert first is not None
    trial = asyncio.create_task(desk.make(**object_schema(1500)))
    await until(lambda: desk.compiler.trials == 2)
    (child,) = children(first)
    os.kill(first, signal.SIGKILL)
    assert await trial
    assert desk.compiler.pid not in (None, first)
    await until(lambda: not is_running(child))
    second = desk.compiler.pid
    assert second is not None
    os.kill(second, signal.SIGKILL)
    await until(lambda: not is_running(second))
    assert await desk.make(guided_regex="b")
    assert desk.compiler.trials == 4


async def test_the_process_ends_with_the_gateway(folder: Path) -> None:
    desk = Desk(folder)
    await desk.compiler.start()
    pid = desk.compiler.pid
    assert pid is not None
    assert desk.compiler._gateway is not None
    desk.compiler._gateway.close()  # as the system does when the gateway is killed
    await until(lambda: not is_running(pid))
    await desk.compiler.close()


async def test_a_gateway_is_ready_after_its_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "launch", LAUNCH)
    config = GatewayConfig(model=str(folder))
    gateway = Gateway(config, [(config, Tokenizer(folder))])
    await PREPARE(gateway)
    try:
        assert gateway.constraints.pid is not None
        wanted = ConstraintFields(guided_regex="a").wanted()
        assert await gateway.constraints.make(0, wanted, "")
    finally:
        await gateway.constraints.close()


async def test_a_tokenizer_that_the_library_cannot_read_refuses_constraints_alone(folder: Path, tmp_path: Path) -> None:
    desk = Desk(folder)
    (told,) = desk.compiler._models
    told["tokenizer"] = str(tmp_path / "nothing.json")
    try:
        with pytest.raises(InvalidRequestError, match="guided_regex: this model's answers cannot be constrained"):
            await desk.make(guided_regex="a")
    finally:
        await desk.compiler.close()
