"""Reading traces of Mooncake and of gateways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.simulator.trace_files import read_trace

OURS: dict[str, Any] = {"timestamp": 500, "input_length": 40, "output_length": 24, "block_tokens": 16}


def write(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_a_gateways_trace_is_sorted_and_begins_at_zero(tmp_path: Path) -> None:
    late = {
        **OURS,
        "timestamp": 1500,
        "class": "chat",
        "key": 9,
        "priority": -1,
        "adapter": 12,
        "session": 7,
        "hash_ids": [1, 2, 3, 2**64 - 1],
    }
    early = {**OURS, "hash_ids": [1, 2, 9, 8], "outcome": "stop"}
    refused = {**OURS, "timestamp": 0, "output_length": 0, "hash_ids": [1, 2]}
    trace = read_trace(write(tmp_path / "trace", late, early, refused))
    first, second = trace
    assert trace.block_tokens == 16
    assert (first.arrival, first.prompt_tokens, first.answer_tokens, list(first.blocks)) == (0.0, 40, 24, [1, 2, 9, 8])
    assert (second.arrival, second.group, second.session) == (1.0, "chat", "7")
    assert (second.owner, second.priority, second.adapter) == ("9", -1, 12)
    assert list(second.blocks)[-1] == 2**64 - 1


def test_only_full_blocks_of_mooncakes_prompts_are_kept(tmp_path: Path) -> None:
    entry = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [*range(14)]}
    trace = read_trace(write(tmp_path / "trace", entry))
    assert trace.block_tokens == 512
    assert [list(request.blocks) for request in trace] == [[*range(13)]]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (
            {"timestamp": 0, "input_length": 3, "block_tokens": 16},
            "line 2 is not a request of a trace: it lacks 'output_length'",
        ),
        ({**OURS, "input_length": 0, "hash_ids": []}, "input_length must be at least 1"),
        ({**OURS, "block_tokens": 20, "hash_ids": []}, "blocks of 20 tokens"),
        ({**OURS, "block_tokens": 32, "hash_ids": []}, "blocks of 32 tokens; all must have the same"),
        ({**OURS, "hash_ids": [-1]}, "line 2"),
        ({**OURS, "timestamp": float("nan"), "hash_ids": []}, "timestamp must be a number"),
        ([1], "line 2 is not an object"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, entry: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_trace(write(tmp_path / "trace", {**OURS, "hash_ids": [1]}, entry))


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\n")
    for path, problem in (
        (tmp_path / "missing", "cannot be read"),
        (tmp_path / "text", "JSON lines"),
        (write(tmp_path / "empty"), "no request"),
    ):
        with pytest.raises(ConfigError, match=problem):
            read_trace(path)
