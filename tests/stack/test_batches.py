"""Batches on a real stack: each line is answered once, although processes are killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from bench.serving.batches import answers, make_lines, submit, survive, wait_for
from tests.stack.processes import Stack
from tests.stack.stacks import SMOLLM as MODEL
from tests.stack.stacks import on

pytestmark = [pytest.mark.model, pytest.mark.stack]


@on("default")
async def test_each_line_is_answered_once_although_all_processes_are_killed(stack: Stack) -> None:
    lines = make_lines(30, MODEL, 8)
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:
        expected = await answers(http, await wait_for(http, await submit(http, lines)))
        assert [name for name, _ in expected] == [line["custom_id"] for line in lines]
        batch, kills = await survive(stack, lines, ("gateway", "prefill", "decode"))
        assert kills == 3
        assert batch["status"] == "completed"
        assert await answers(http, batch) == expected
        await stack.settled()


def test_run_batch_starts_a_stack_and_answers_a_file(tmp_path: Path) -> None:
    lines = [*make_lines(3, MODEL, 4), {**make_lines(1, "other")[0], "custom_id": "wrong"}]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "paceline", "run-batch", f"-i{source}", f"-o{target}", f"--model={MODEL}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "completed: 4 of 4 lines, 1 failed" in done.stderr
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["custom_id"] for line in found] == [line["custom_id"] for line in lines]
    assert [line["response"]["status_code"] for line in found] == [200, 200, 200, 404]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
