from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.copies import places
from bench.gpu.forward import Pass, floor_seconds, matrix_elements, visible_pairs
from bench.gpu.random_model import GEMMA_27B, LLAMA_8B, PackedWeights, RandomWeights
from paceline.kernels import select_kernels
from paceline.kernels.packed_weight import PackedWeight
from paceline.models.model_config import ModelConfig
from paceline.models.registry import MODELS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


BENCHMARKS = ("kernels", "copies", "handoff", "forward-gemma-3-27b", "experts")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The figures that one command has written, by benchmark."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    out = tmp_path_factory.mktemp("gpu")
    done = run("bench.gpu", "--out", str(out), "--small", *(f"--only={name}" for name in BENCHMARKS))
    assert done.returncode == 0, done.stderr
    return {name: json.loads((out / f"{name}.json").read_text()) for name in BENCHMARKS}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", BENCHMARKS)
def test_small_benchmarks_write_what_large_ones_do(name: str, written: dict[str, Any]) -> None:
    assert written[name]["machine"]["torch"] == torch.__version__
    results = written[name]["results"]
    if name == "kernels":
        names = {result["kernel"] for result in results}
        assert {"add_rms_norm", "rotate_and_store", "choose, top_k, top_p"} < names
        assert min(result["seconds"] for result in results) > 0
    elif name == "copies":
        assert {(result["way"], result["run"]) for result in results} == {
            (way, count) for way in ("to the host", "to the device") for count in (1, 8)
        }
        assert min(result["bytes_per_second"] for result in results) > 0
    elif name == "handoff":
        assert min(result["share"] for result in results) > 0
    elif name == "experts":
        assert min(result["whole"] for result in results) > 0
        assert max(result["experts_in_use"] for result in results) > 0
    else:
        assert [f"forward-{result['model']}" for result in results] == [name]
        assert min(own["transformers_seconds"] for result in results for own in result["passes"]) > 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("module", ["bench.gpu", pytest.param("bench.gpu.forward", marks=pytest.mark.thorough)])
def test_without_a_gpu_they_say_so(module: str, tmp_path: Path) -> None:
    done = run(module, "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stderr.strip() == "there is no CUDA device here; --small runs tiny shapes on the CPU"


class MetaWeights(PackedWeights):
    """Weights that count elements of matrices and make no tensors."""

    def __init__(self, config: ModelConfig) -> None:
        device = torch.device("meta")
        super().__init__(RandomWeights(config, torch.bfloat16, device), select_kernels(device, "reference"))
        self.elements = 0
        self.take = lambda name, *shape: torch.empty(shape, device=device)  # type: ignore[method-assign]

    def take_packed(self, name: str, *shape: int, order: Sequence[int] | None = None) -> PackedWeight:
        self.elements += shape[0] * shape[1]
        return PackedWeight(torch.empty(shape, device="meta"), shape[0], shape[1], torch.bfloat16)


@pytest.mark.parametrize(("config", "billions"), [(LLAMA_8B, 8.03), (GEMMA_27B, 27.0)], ids=["llama", "gemma"])
def test_the_floor_counts_every_matrix_once(config: ModelConfig, billions: float) -> None:
    weights = MetaWeights(config)
    MODELS[config.architecture](config, weights, select_kernels(torch.device("meta"), "reference"))
    assert weights.elements == pytest.approx(billions * 1e9, rel=0.01)
    # If the embedding is not also the head, a step reads only one row of it per token.
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert matrix_elements(config) == weights.elements - embedding


def test_a_floor_is_bytes_for_decoding_and_operations_for_a_prompt() -> None:
    one = Pass("", 2, 1, 100)
    assert visible_pairs(LLAMA_8B, one) == 32 * 2 * 100
    cache = 2 * 32 * 2 * 100 * 8 * 128
    assert floor_seconds(LLAMA_8B, one, 2, 1e12, 1.0) == pytest.approx((matrix_elements(LLAMA_8B) + cache) * 2 / 1e12)
    prompt = Pass("", 1, 3, 3)
    assert visible_pairs(LLAMA_8B, prompt) == 32 * (1 + 2 + 3)
    head = 128_256 * 4096
    products = 3 * (matrix_elements(LLAMA_8B) - head) + head + 2 * 32 * 6 * 32 * 128
    assert floor_seconds(LLAMA_8B, prompt, 2, 1.0, 1e12) == pytest.approx(2 * products / 1e12)


def test_a_window_bounds_what_is_read() -> None:
    far = Pass("", 1, 1, 4096)
    full = sum(kind == "full" for kind in GEMMA_27B.layer_types)
    assert full == 10
    assert visible_pairs(GEMMA_27B, far) == full * 4096 + (62 - full) * 1024


def test_places_are_different_slots_in_runs() -> None:
    found = places(64, 8, 1)
    assert len(set(found)) == len(found) == 64
    assert max(found) < 128
    assert all(found[index + 1] == found[index] + 1 for index in range(63) if index % 8 != 7)
    assert found != places(64, 8, 2)
