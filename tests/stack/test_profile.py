"""A stack is profiled, its requests are recorded, and what was recorded is simulated with the profile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from paceline.client import GatewayClient
from paceline.core.errors import UnavailableError
from paceline.core.step_times import read_profile
from paceline.profiler.profile import profile
from paceline.profiler.stack import ProfiledStack
from paceline.simulator.scenario import Scenario
from paceline.simulator.simulation import simulate
from paceline.simulator.trace_files import read_trace
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.stack.processes import Stack, serve
from tests.tiny_checkpoints import write_tiny

pytestmark = pytest.mark.stack

SECRET_WORDS = "the treasure is below the oak"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded") / "trace.jsonl"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, recorded: Path) -> Iterator[Stack]:
    """A stack with a tiny model, which records its requests."""
    folder = tmp_path_factory.mktemp("small")
    model = write_toy_model(folder / "model")
    write_tiny(model, "llama", vocab_size=VOCAB_SIZE, eos_token_id=256, max_position_embeddings=2048)
    limits = ("--max-model-len=512", "--max-batched-tokens=128", "--max-seqs=4")
    with serve(folder / "log", str(model), f"--record-trace={recorded}", "--threads=1", *limits) as stack:
        yield stack


def test_a_profile_is_learned_and_simulates_what_was_recorded(small: Stack, recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile(GatewayClient(small.url), path, "a laptop", scales=False)
    learned = read_profile(path)
    assert (learned.machine, learned.max_model_len, learned.prefill.max_batched_tokens) == ("a laptop", 512, 128)
    assert learned.turns is None
    assert min(learned.decode.steps.decode.points)[0] == 1
    assert {16, 32, 64, 128} <= {tokens for tokens, _ in learned.prefill.steps.prefill.points}
    assert 0 < learned.prefill.steps.prefill_seconds(128, 0) < 1
    assert learned.host_tokens > 512
    body = {"prompt": SECRET_WORDS, "max_tokens": 3, "temperature": 0}
    httpx.post(f"{small.url}/v1/completions", json=body, timeout=60).raise_for_status()
    httpx.post(f"{small.url}/v1/completions", json=body, timeout=60).raise_for_status()
    deadline = time.monotonic() + 10
    while True:  # lines are written after the answers
        text = recorded.read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        if lines[-1]["hash_ids"] == lines[-2]["hash_ids"] or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert lines[-1]["hash_ids"] == lines[-2]["hash_ids"] != []
    assert "oak" not in text
    trace = read_trace(recorded)
    (found,) = simulate(Scenario(learned, 1, 1), trace).classes.values()
    assert found.finished == found.requests == len(lines)


def test_a_stack_with_other_requests_is_not_profiled(small: Stack) -> None:
    stack, over = ProfiledStack(GatewayClient(small.url)), threading.Event()

    def ask() -> None:
        while not over.is_set():
            body = {"prompt": "once", "max_tokens": 480, "ignore_eos": True, "n": 8}
            httpx.post(f"{small.url}/v1/completions", json=body, timeout=60).raise_for_status()

    def look() -> None:
        deadline = time.monotonic() + 60  # workers say once a second what they run
        while time.monotonic() < deadline:
            stack.facts()

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            with pytest.raises(UnavailableError, match="profile a stack that does nothing else"):
                look()
        finally:
            over.set()
        asking.result()
