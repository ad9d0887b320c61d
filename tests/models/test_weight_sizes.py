"""The memory that weights take by format, and what `paceline prepare` says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.cli.footprint import report_prepared
from paceline.core.config import ServeConfig
from paceline.core.errors import ConfigError
from paceline.kernels import select_kernels
from paceline.kernels.native import NativeKernels
from paceline.models.config import weight_form
from paceline.models.loader import load_model
from paceline.models.weight_sizes import weight_sizes
from tests.models.formats import test_awq, test_bitsandbytes, test_packed_width
from tests.models.formats.stored import store

CPU = torch.device("cpu")


def packed_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch, form: Any) -> int:
    """Return the bytes of all packed matrices of a model in bf16."""
    packed = 0
    original = NativeKernels.pack

    def pack(kernels: Any, weight: Any, allocate: Any = None) -> Any:
        nonlocal packed
        found = original(kernels, weight, allocate)
        packed += found.data.nbytes
        return found

    monkeypatch.setattr(NativeKernels, "pack", pack)
    kernels = select_kernels(CPU)
    kernels.compresses = False  # type: ignore[attr-defined]
    load_model(folder, torch.bfloat16, kernels, CPU, quantization=form)
    return packed


@pytest.mark.parametrize("form", ["none", "int8", "int4", "mxfp4", "fp8", "mxfp8"])
def test_sizes_are_those_of_packed_matrices(
    tmp_path: Path, save_llama: Any, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    save_llama(vocab_size=256, hidden_size=96, intermediate_size=192, tie_word_embeddings=False)
    sizes = weight_sizes(tmp_path, weight_form(tmp_path, form), "bfloat16")
    assert sum(sizes.values()) == pytest.approx(packed_bytes(tmp_path, monkeypatch, form), rel=0.05)
    named = {"none": {"bfloat16"}, "int8": {"int8", "bfloat16"}}.get(form, {form, "bfloat16"})
    assert sizes.keys() == named


STORED: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": (test_awq.config_of("gemm", 32), lambda weight: test_awq.pack("gemm", 32, weight)[0]),
    "bitsandbytes": (test_bitsandbytes.config_of(), lambda weight: test_bitsandbytes.pack(weight)[0]),
    "compressed-tensors": test_packed_width.FORMATS["NVFP4"][:2],
    "fp8": test_packed_width.FORMATS["FP8"][:2],
    "modelopt": test_packed_width.FORMATS["NVFP4 of ModelOpt"][:2],
}


@pytest.mark.parametrize("name", STORED)
def test_sizes_of_a_quantized_checkpoint_are_those_of_packed_matrices(
    tmp_path: Path, save_llama: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config, pack = STORED[name]
    reference = save_llama(vocab_size=256, hidden_size=192, intermediate_size=384, tie_word_embeddings=False)
    store(tmp_path, reference, config, lambda _, weight: (pack(weight), weight))
    sizes = weight_sizes(tmp_path, weight_form(tmp_path, "auto"), "bfloat16")
    assert sum(sizes.values()) == pytest.approx(packed_bytes(tmp_path, monkeypatch, "auto"), rel=0.05)
    assert sizes["bfloat16"] == pytest.approx(2 * 256 * 192 * 2, rel=0.05)  # the embedding and the head
    assert len(sizes) == 2


def prepared(folder: Path, **options: Any) -> list[str]:
    lines: list[str] = []
    report_prepared(folder, ServeConfig(cache_dir=str(folder / "cache"), **options), lines.append)
    return lines


def test_prepare_says_what_a_model_takes(tmp_path: Path, save_llama: Any) -> None:
    save_llama(vocab_size=256, hidden_size=96, intermediate_size=192)
    (line,) = prepared(tmp_path, quantization="int4")
    assert "weights take " in line
    assert "int4 " in line
    assert "KV " in line
    assert f"native kernels with {NativeKernels(1).instruction_set}" in line


def test_prepare_refuses_what_does_not_fit(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}')
    save_file({"model.layers.0.mlp.down_proj.qweight": torch.zeros(4, 4).int()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="quantized as GPTQ already"):
        prepared(tmp_path, quantization="mxfp8")


def test_prepare_keeps_the_cache_within_its_size(tmp_path: Path, save_llama: Any, monkeypatch: Any) -> None:
    save_llama(vocab_size=256)
    asked = []
    monkeypatch.setattr("paceline.cli.footprint.keep_within", lambda folder, size: asked.append((folder, size)))
    prepared(tmp_path, cache_size="1GiB")
    assert asked == [(tmp_path / "cache", "1GiB")]
