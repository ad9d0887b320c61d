"""Recording a trace: lines without texts, in files of a bounded size."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.core.adapters import Adapter
from paceline.core.errors import ConfigError
from paceline.core.types import Token
from paceline.services.common.secret import Secret
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.progress import Generated
from paceline.services.gateway.sequences.sequence import SequenceRun
from paceline.services.gateway.telemetry.trace_recorder import TraceRecorder
from tests.services.gateway.toy_plans import toy_sequence

SECRET = Secret("a-secret-of-a-cluster")
SIZE = 1 << 20


def layouts() -> dict[str, str]:
    return {"host": "layout"}


def recorder(path: Path, size: int = SIZE, secret: Secret = SECRET) -> TraceRecorder:
    return TraceRecorder(path, size, secret, layouts)


def sequence(prompt: list[int], answer: list[int] | None = None, adapter: Adapter | None = None) -> SequenceRun:
    run = toy_sequence(prompt, request_class="chat", adapter=adapter)
    run.trace.prompt_tokens = len(prompt)
    run.note(Generated([Token(token_id) for token_id in answer or ()]), AttemptTrace())
    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_lengths_and_names_of_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    own = recorder(path)
    system = list(range(32))
    own.record(sequence([*system, *range(40, 60)], list(range(13))), time.monotonic(), "talk", "stop")
    own.record(sequence([*system, *range(70, 80)]), time.monotonic(), "", "error")
    own.record(sequence(system, adapter=Adapter("sql", "/loras/sql", bytes(32))), time.monotonic(), "", "stop")
    own.close()
    first, second, third = lines(path)
    assert (first["input_length"], first["output_length"], first["class"], first["outcome"]) == (52, 13, "chat", "stop")
    assert len(first["hash_ids"]) == 4  # the last one has tokens of the answer
    assert first["hash_ids"][:2] == second["hash_ids"]
    assert 0 <= first["timestamp"] <= second["timestamp"]
    assert "session" in first
    assert "session" not in second
    assert "adapter" not in second
    assert 0 < third["adapter"] < 1 << 64
    assert not {*third["hash_ids"]} & {*second["hash_ids"]}
    assert path.stat().st_mode & 0o077 == 0


def test_names_depend_on_the_secret_alone(tmp_path: Path) -> None:
    names = []
    for number, secret in enumerate((SECRET, SECRET, Secret("another-secret-of-one"), Secret(), Secret())):
        own = recorder(tmp_path / f"{number}", secret=secret)
        own.record(sequence(list(range(16))), time.monotonic(), "", "stop")
        own.close()
        names.append(lines(tmp_path / f"{number}")[0]["hash_ids"][0])
    assert names[0] == names[1]
    assert len(set(names)) == 4


def test_files_are_bounded_and_an_old_trace_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("old\n")
    own = recorder(path, size=4000)
    assert (tmp_path / "trace.jsonl.1").read_text() == "old\n"
    for _ in range(40):
        own.record(sequence(list(range(64))), time.monotonic(), "", "stop")
    own.close()
    files = list(tmp_path.iterdir())
    assert len(files) == 2
    assert all(file.stat().st_size < 2500 for file in files)
    assert len(lines(tmp_path / "trace.jsonl.1")) > 3


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--record-trace .* cannot be written"):
        recorder(tmp_path / "missing" / "trace.jsonl")


def test_a_file_that_could_not_be_replaced_is_tried_again(tmp_path: Path) -> None:
    path, older = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.1"
    own = recorder(path, size=2)  # each line fills the file
    (older / "in the way").mkdir(parents=True)
    own.record(sequence([1]), time.monotonic(), "", "stop")
    deadline = time.monotonic() + 10
    while not own.dropped:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (older / "in the way").rmdir()
    older.rmdir()
    own.record(sequence([1, 2]), time.monotonic(), "", "stop")
    own.close()
    assert [line["input_length"] for line in lines(older)] == [2]
