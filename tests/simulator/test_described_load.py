"""Loads that a file describes."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.simulator.described_load import DescribedLoad, read_load
from paceline.simulator.trace import TraceRequest

CHAT: dict[str, Any] = {"class": "chat", "prompt": 40, "answer": 20}


def requests(kinds: list[dict[str, Any]], seconds: float = 1000, **arrivals: Any) -> list[TraceRequest]:
    load = {"seconds": seconds, "arrivals": arrivals or {"rate": 2.0}, "requests": kinds}
    return list(DescribedLoad.model_validate(load).trace())


def test_arrivals_have_the_rate_of_the_schedule_and_are_in_order() -> None:
    made = requests([CHAT], schedule=[[0, 1.0], [500, 5.0]])
    times = [request.arrival for request in made]
    assert times == sorted(times)
    assert 420 < sum(at < 500 for at in times) < 580
    assert 2300 < sum(at >= 500 for at in times) < 2700
    even = [request.arrival for request in requests([CHAT], process="even", rate=4.0)]
    assert {round(after - before, 9) for before, after in itertools.pairwise(even)} == {0.25}
    bursts = requests([CHAT], process="bursts", rate=4.0, burst=8)
    assert all(len(list(group)) % 8 == 0 for _, group in itertools.groupby(request.arrival for request in bursts))


def test_lengths_have_their_distribution_and_kinds_their_share() -> None:
    skewed = {**CHAT, "prompt": {"median": 300, "p99": 3000}, "weight": 3}
    uniform = {**CHAT, "class": "batch", "prompt": {"least": 10, "most": 30}}
    made = requests([skewed, uniform], rate=20.0)
    chats = [request.prompt_tokens for request in made if request.group == "chat"]
    assert len(chats) / len(made) == pytest.approx(0.75, abs=0.02)
    assert statistics.median(chats) == pytest.approx(300, rel=0.05)
    assert statistics.quantiles(chats, n=100)[-1] == pytest.approx(3000, rel=0.2)
    assert {request.prompt_tokens for request in made if request.group == "batch"} == set(range(10, 31))


def test_conversations_repeat_themselves_and_share_system_prompts() -> None:
    made = requests([{**CHAT, "prefix": {"tokens": 40, "kinds": 2}, "turns": 4, "think": 5}])
    talks: dict[str, list[TraceRequest]] = {}
    for request in made:
        talks.setdefault(request.session, []).append(request)
    assert 3.5 < len(made) / len(talks) < 4.5
    for turns in talks.values():
        for before, after in itertools.pairwise(turns):
            assert after.arrival == pytest.approx(before.arrival + 5)
            assert after.prompt_tokens == before.prompt_tokens + before.answer_tokens + 40
            assert after.blocks[: len(before.blocks)] == before.blocks
    firsts = [turns[0] for turns in talks.values()]
    assert len({tuple(request.blocks[:2]) for request in firsts}) == 2
    assert len({request.blocks[2] for request in firsts}) == len(firsts)
    assert all(len(request.blocks) == (request.prompt_tokens + request.answer_tokens) // 16 for request in made)


def test_a_load_can_be_read_again_and_again(tmp_path: Path) -> None:
    load = {"seconds": 50, "arrivals": {"rate": 2.0}, "requests": [{**CHAT, "turns": 2.5}]}
    path = tmp_path / "load.json"
    path.write_text(json.dumps(load))
    trace = read_load(path).trace()
    assert list(trace) == list(trace) != []
    toml = tmp_path / "load.toml"
    toml.write_text(
        "seconds = 50\n[arrivals]\nrate = 2.0\n[[requests]]\nclass = 'chat'\nprompt = 40\nanswer = 20\nturns = 2.5\n"
    )
    assert list(read_load(toml).trace()) == list(trace)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seconds = 5", "arrivals: Field required"),
        ("seconds = [", "neither TOML nor JSON"),
        ("seconds = 5\narrivals = {}\nrequests = [{prompt = 1, answer = 1}]", "either rate or schedule"),
        ("seconds = 5\narrivals = {rate = 1, burst = 3}\nrequests = [{prompt = 1, answer = 1}]", "burst needs"),
        ("seconds = 5\narrivals = {rate = 1}\nrequests = [{prompt = 0, answer = 1}]", "requests.0.prompt: give a"),
        (
            "seconds = 5\narrivals = {rate = 1}\nrequests = [{prompt = {median = 9, p99 = 5}, answer = 1}]",
            "requests.0.prompt: give a number above 0",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "load.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_load(path)


def test_adapters_follow_zipf_and_have_blocks_of_their_own() -> None:
    kind = {"prompt": 20, "answer": 5, "prefix": {"tokens": 32, "kinds": 2}, "adapters": {"count": 10, "zipf": 1.0}}
    load = DescribedLoad.model_validate({"seconds": 2000, "arrivals": {"rate": 2.0}, "requests": [kind]})
    requests = list(load.trace())
    counts = Counter(request.adapter for request in requests)
    assert set(counts) == set(range(1, 11))
    assert counts[1] / counts[2] == pytest.approx(2, rel=0.3)
    assert counts[1] / counts[10] == pytest.approx(10, rel=0.5)
    adapters_of = defaultdict[int, set[int]](set)
    for request in requests:
        adapters_of[request.blocks[0]].add(request.adapter)
    assert len(adapters_of) == 20
    assert all(len(own) == 1 for own in adapters_of.values())
