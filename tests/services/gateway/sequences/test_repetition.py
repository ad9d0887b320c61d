"""Answers that repeat themselves are found at the first token that completes the last repetition."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.planning.schemas import RepetitionDetection
from paceline.services.gateway.sequences.repetition import RepetitionDetector
from tests.services.gateway.conftest import Stack


def found_at(tokens: list[int], most: int, least: int, count: int) -> int | None:
    wanted = RepetitionDetection(max_pattern_size=most, min_pattern_size=least, min_count=count)
    detector = RepetitionDetector(wanted)
    return next((index for index, token in enumerate(tokens, 1) if detector.push(token)), None)


def slow(tokens: list[int], most: int, least: int, count: int) -> int | None:
    for end in range(1, len(tokens) + 1):
        for size in range(max(1, least), most + 1):
            pattern = tokens[max(0, end - size) : end]
            if size * count <= end and tokens[end - size * count : end] == pattern * count:
                return end
    return None


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6), st.integers(0, 6), st.integers(2, 4))
def test_it_finds_what_a_slow_search_finds(tokens: list[int], most: int, least: int, count: int) -> None:
    least = min(most, least)
    assert found_at(tokens, most, least, count) == slow(tokens, most, least, count)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_ends_where_it_repeats_itself(stack: Stack, stream: bool) -> None:
    for worker in stack.workers.values():
        worker.script = b"Well, " + b"no no " * 20
    wanted = {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 3}
    body = {"prompt": "x", "max_tokens": 90, "seed": 0, "stream": stream}
    text = (await stack.post("/v1/completions", **body, repetition_detection=wanted)).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line and "[DONE]" not in line]
    last = chunks[-1]["choices"][0]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Well, no no no"
    assert (last["finish_reason"], last["stop_reason"]) == ("repetition", "repetition_detected")
    unwanted = await stack.post("/v1/completions", **body, repetition_detection={"max_pattern_size": 0})
    assert "repetition" not in unwanted.text
