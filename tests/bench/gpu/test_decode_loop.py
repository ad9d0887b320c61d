from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.compute.loop import run
from bench.gpu.random_model import CIRCLE, RandomWeights, llama_config, load_random
from bench.gpu.step_clock import StepClock
from paceline.core.speculative import Method, SpeculativeConfig
from paceline.engine.step import Step, StepResult
from paceline.kernels import select_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TWO_LAYERS = llama_config(hidden=32, inner=48, layers=2, heads=2, kv_heads=1, vocab=64)


@pytest.mark.slow
def test_the_small_benchmark_writes_what_the_large_one_does(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.gpu.decode_loop", "--small", "--rounds", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["results"]
    assert [result["batch"] for result in results] == [1, 3]
    for result in results:
        assert result["tokens_are_equal"]
        assert all(own["tokens_per_second"] > 0 for own in result["ways"].values())
        assert result["ways"]["two steps"]["tokens_a_step"] == 1
        assert result["ways"]["two steps, early layers"]["tokens_a_step"] > 1
        assert {"device_idle_ms", "device_forward_ms", "device_rest_ms"} < result["ways"]["two steps"].keys()
        assert str(result["batch"]) in done.stdout


def test_the_random_model_counts_in_circles_and_jumps() -> None:
    config = llama_config(hidden=256, inner=640, layers=2, heads=4, kv_heads=2, vocab=4096)
    weights = RandomWeights(config, torch.float32, torch.device("cpu"))
    loaded = load_random(weights, select_kernels(torch.device("cpu"), "reference"), None)
    tokens = run(loaded, 2, [[100], [1000]], 100, torch.device("cpu")).tokens
    counted = [
        after == before - before % CIRCLE + (before + 1) % CIRCLE
        for own in tokens
        for before, after in itertools.pairwise(own)
    ]
    assert 0.5 < sum(counted) / len(counted) < 1


# Rows that pad a step have arbitrary content, about which numpy warns in Triton's interpreter.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow ", "ignore:invalid value ", "ignore:divide by zero ")
# Lookups find drafts only if the model counts, which takes a strong signal. With a weak one, tokens are closer rivals.
@pytest.mark.parametrize(
    ("method", "signal"), [("ngram", 6.0), pytest.param("early_layers", 1.5, marks=pytest.mark.thorough)]
)
def test_the_loop_gives_the_same_tokens_with_drafts_on_triton_kernels(method: Method, signal: float) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    kernels = select_kernels(DEVICE, "triton-invariant")
    weights = RandomWeights(TWO_LAYERS, torch.float32, DEVICE, signal)
    drafts = SpeculativeConfig(method, 3, num_layers=1, adaptive=False)
    prompts = [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1], [9, 10, 11, 12, 13, 14, 15, 8, 9]]
    plain = load_random(weights, select_kernels(DEVICE, "reference"), None)  # Triton's interpreter is slow
    alone = [run(plain, 1, [prompt], 5, DEVICE).tokens[0] for prompt in prompts]
    together = run(load_random(weights, kernels, drafts), 2, prompts, 5, DEVICE)
    assert together.tokens == alone
    assert together.accepted_length > 1


def test_the_clock_tells_the_gaps_between_steps_from_the_steps() -> None:
    class Steps:
        """A runner whose step runs the model and then drafts with it."""

        def execute(self, step: Step) -> StepResult:
            for _ in range(3):
                clock.mark_forward()
                clock.mark_forward()
            return StepResult([])

    clock = StepClock(torch.device("cpu"))
    runner = clock.watch(Steps())
    for _ in range(3):
        runner.execute(Step(()))
    times = clock.times()
    assert 0 < times.bubble < 1
    assert min(times.idle_ms, times.forward_ms, times.rest_ms) > 0
    clock.watch(Steps())
    runner.execute(Step(()))
    with pytest.raises(statistics.StatisticsError):  # one step has no gap, and earlier steps are forgotten
        clock.times()
