"""Replays of traces against the pool."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from bench.cache.oracles import Belady, Returning
from bench.cache.policy import measure, replay
from bench.cache.traces import SYNTHETIC, make_trace, read_trace, with_owners
from paceline.core.cache_policy.lru import LRU
from paceline.core.cache_policy.registry import POLICIES

TRACE = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3], [7], [1, 2, 4]]


def test_what_is_found_is_a_prefix() -> None:
    found = replay(TRACE, 100, LRU(100))
    assert (found.asked, found.found, found.evicted) == (15, 8, 0)


def test_lru_by_hand() -> None:
    # After [1 2 3], block 4 replaces 3. Then 5 and 6 replace 4 and 2, so that only 1 is found.
    assert replay(TRACE[:4], 3, LRU(3)).found == 2 + 1


def test_a_request_larger_than_the_cache_uses_all_of_it() -> None:
    assert replay([[1, 2, 3, 4]] * 2, 2, LRU(2)).found == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNTHETIC)
def test_nobody_beats_who_knows_the_future(name: str) -> None:
    trace = make_trace(name, 1)[:400]
    best = replay(trace, 150, Belady(150, trace)).found
    assert best >= replay(trace, 150, Returning(150, trace)).found
    assert best >= max(replay(trace, 150, make(150)).found for make in POLICIES.values())


def test_what_is_known_to_return_stays() -> None:
    trace = [[1, 2], [3, 4], [5, 6], [1, 2]]
    assert replay(trace, 4, LRU(4)).found == 0
    assert replay(trace, 4, Returning(4, trace)).found == 2


def test_owners_share_no_block_but_those_of_shared_prompts() -> None:
    system = [1, 2]
    talks = [[[*system, *range(10 * talk, 10 * talk + turn)] for turn in (2, 4)] for talk in range(1, 9)]
    trace = [request for turn in zip(*talks) for request in turn]

    def different(**options: object) -> int:
        made = with_owners(trace, **options)  # type: ignore[arg-type]
        assert [len(request) for request in made] == [len(request) for request in trace]
        assert all(made[place + 8][:4] == made[place] for place in range(8)), "a conversation has one owner"
        return len({block for request in made for block in request})

    assert different(owners=1) == different(owners=0) == different(owners=1000, shares_prompts=True) == 2 + 8 * 4
    assert different(owners=1000) == 8 * 6
    assert different(owners=2, seed=1) == 2 * 2 + 8 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_traces_are_functions_of_their_seed(name: str) -> None:
    first = make_trace(name, 1)
    assert first == make_trace(name, 1)
    assert first != make_trace(name, 2)
    parents: dict[int, int] = {}
    for request in first:
        assert len({*request}) == len(request)
        for parent, block in itertools.pairwise(request):
            assert parents.setdefault(block, parent) == parent, "a block stands behind two others"


def test_all_policies_stand_beside_the_optimum() -> None:
    found = measure([*TRACE, *TRACE], [5, 10], ["lru"])
    assert [*found] == ["lru", "returning", "belady"]
    assert found["belady"][5].found > found["lru"][5].found


def test_recorded_traces(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps({"timestamp": 0, "hash_ids": request}) for request in TRACE))
    assert read_trace(file) == TRACE


@pytest.mark.parametrize("text", ['{"ids": [1]}', "1", "{", '{"hash_ids": [1, 1]}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match="trace"):
        read_trace(file)
