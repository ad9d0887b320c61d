from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from bench.compute.loop import Run, run
from bench.compute.scaling import draw, measure, points, show
from bench.gpu.random_model import RandomWeights, llama_config, load_random
from paceline.engine.loading import Loaded
from paceline.kernels import select_kernels

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    config = llama_config(hidden=32, inner=48, layers=2, heads=4, kv_heads=2, vocab=64)
    return load_random(RandomWeights(config, torch.float32, CPU), select_kernels(CPU, "auto"), None)


def test_adopted_contexts_are_decoded_without_being_computed(loaded: Loaded) -> None:
    computed, adopted = (run(loaded, 2, [[5] * 50] * 3, 8, CPU, max_len=58, adopted=how) for how in (False, True))
    assert [len(tokens) for tokens in adopted.tokens] == [8] * 3
    # The random blocks are read, because the tokens differ from those of the computed context.
    assert adopted.tokens != computed.tokens


def test_a_context_ends_with_the_length_that_was_asked_for(loaded: Loaded) -> None:
    done = measure(loaded, context=128, batch=2, tokens=16)
    assert [len(tokens) for tokens in done.tokens] == [16] * 2
    assert min(done.tokens_per_second, done.cpu_ms, done.resident_bytes) > 0


def test_no_more_memory_is_taken_than_allowed(loaded: Loaded) -> None:
    block = loaded.layout.slot_bytes  # bytes of a block of 16 tokens
    assert points(loaded, [16, 64], [1, 4], 4 * block) == [(16, 1), (16, 4), (64, 1)]


def test_the_best_of_all_rounds_is_shown(tmp_path: Path) -> None:
    slow = Run(10.0, 0.0, 1.0, [], cpu_ms=9.0, resident_bytes=3 << 20)
    runs = {(128, 1): [slow, dataclasses.replace(slow, tokens_per_second=20.0, cpu_ms=8.0)], (128, 2): [slow]}
    assert "| 128, 1         | 20.0     | 8.0                  | 3.0          |" in show(runs).splitlines()
    draw(runs, tmp_path / "curves.svg")
    assert "128 tokens of context" in (tmp_path / "curves.svg").read_text()
