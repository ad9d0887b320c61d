from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.common.mixed import Outcome
from bench.serving.thinking import BUDGETS, END, START, add_markers, complaint, thinking_requests, thinking_tokens
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.services.gateway.toy_model import write_toy_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_toy_model(tmp_path_factory.mktemp("models") / "toy"))


def test_every_budget_is_asked_for_in_every_kind_of_chat() -> None:
    asked = thinking_requests(100, 1)
    assert asked == thinking_requests(100, 1) != thinking_requests(100, 2)
    assert {request.body["thinking_token_budget"] for request in asked} == set(BUDGETS)
    assert {name for request in asked for name in request.body} >= {"tools", "tool_choice", "response_format", "seed"}


def test_tokens_before_the_marker_are_reasoning(tokenizer: Tokenizer) -> None:
    assert thinking_tokens(list(b"abc</think>d</think>"), tokenizer) == 3
    assert thinking_tokens(list(b"</think>"), tokenizer) == 0
    assert thinking_tokens(list(b"abc</think"), tokenizer) is None


def test_too_few_and_too_many_tokens_are_a_complaint(tokenizer: Tokenizer) -> None:
    request = next(
        request
        for request in thinking_requests(100, 1)
        if request.body["thinking_token_budget"] == 7 and request.body["messages"][-1]["content"] == f"{START}\n"
    )
    for length, told, expected in ((7, 7, True), (6, 6, False), (8, 8, False), (7, 8, False)):
        outcome = Outcome(list(b"x" * length + END.encode()), reasoning_tokens=told)
        assert (complaint(request, outcome, tokenizer) == "") is expected
    assert complaint(request, Outcome(list(b"x" * 7), reasoning_tokens=7), tokenizer)


def test_answers_may_end_within_their_reasoning_but_not_beyond_their_budget(tokenizer: Tokenizer) -> None:
    request = next(request for request in thinking_requests(100, 1) if request.body["thinking_token_budget"] == 7)
    spent = request.body["messages"][-1]["content"].removeprefix(START).strip()
    wanted = max(0, 7 - len(spent))
    for length, reason, expected in ((wanted, "stop", True), (wanted + 1, "stop", False), (wanted, "length", False)):
        outcome = Outcome(list(b"x" * length), finish_reason=reason, reasoning_tokens=length)
        assert (complaint(request, outcome, tokenizer) == "") is expected
    calls = list(b"x" * wanted + b"<tool_call>{}</tool_call><tool_call>")
    assert complaint(request, Outcome(calls, finish_reason="length", reasoning_tokens=wanted), tokenizer) == ""


def test_markers_take_the_places_of_special_tokens(tmp_path: Path) -> None:
    model = write_toy_model(tmp_path / "toy")
    (model / "model.safetensors").write_text("weights")
    add_markers(model, tmp_path / "marked")
    tokenizer = Tokenizer(tmp_path / "marked")
    assert tokenizer.encode(f"x{START}y{END}", False) == [ord("x"), 257, ord("y"), 258]
    assert (tmp_path / "marked" / "model.safetensors").read_text() == "weights"
    assert json.loads((tmp_path / "marked" / "config.json").read_text())
