"""Models with quantized matrices: their weights, and that `gguf` changes no bit but by products in integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from paceline.core.errors import ConfigError, ModelError
from paceline.kernels import rounds_blocks, select_kernels
from paceline.models.base import Model
from paceline.models.files.gguf_reference import REFERENCE_FILE, read_reference
from paceline.models.gguf.blocks import BlockMatrix
from paceline.models.gguf.convert import convert_gguf
from paceline.models.gguf.file import GgufFile
from paceline.models.identity import model_identity
from paceline.models.loader import load_model
from tests.models.gguf_files import write_gguf

CPU = torch.device("cpu")
PROMPTS = {0: list(range(3, 60)), 1: [7, 8, 9], 2: [30]}


def load(
    folder: Path,
    quantization: Any,
    dtype: torch.dtype = torch.bfloat16,
    kernels: str = "auto",
    packed_dir: Path | None = None,
) -> Model:
    return load_model(folder, dtype, select_kernels(CPU, kernels), CPU, packed_dir, quantization)


@pytest.fixture
def save_converted(tmp_path: Path, save_llama: Any) -> Callable[..., Path]:
    """A function that saves a tiny Llama as GGUF with matrices of a given type, converts it, and returns the folder."""

    def save(type_name: str = "Q4_1") -> Path:
        reference = save_llama(vocab_size=261, hidden_size=64, intermediate_size=96, num_key_value_heads=2,
                               num_attention_heads=4)  # fmt: skip
        source = write_gguf(tmp_path / "tiny.gguf", reference, quantized=gguf.GGMLQuantizationType[type_name])
        folder = tmp_path / "converted"
        folder.mkdir()
        convert_gguf(source, folder)
        return folder

    return save


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_blocks_of_qwen_compute_the_bits_of_the_converted_model(
    tmp_path: Path, request: pytest.FixtureRequest, paged_contexts: Any, family: str
) -> None:
    shape = {"vocab_size": 261, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    if family == "qwen3":
        shape["head_dim"] = 128
    reference = request.getfixturevalue(f"save_{family}")(use_sliding_window=False, num_hidden_layers=2, **shape)
    source = write_gguf(tmp_path / "tiny.gguf", reference, family, "qwen2", gguf.GGMLQuantizationType.Q8_0)
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(source, folder)
    assert len(read_reference(folder).matrices) == 2 + 2 * 7
    whole, quantized = (logits(load(folder, how), paged_contexts) for how in ("none", "gguf"))
    for prompt in PROMPTS:
        assert_same(whole[prompt], quantized[prompt], torch.bfloat16)


def logits(model: Model, paged_contexts: Any, dtype: torch.dtype = torch.bfloat16) -> dict[int, torch.Tensor]:
    contexts = paged_contexts(model, len(PROMPTS), 128, dtype)
    first = contexts.step(PROMPTS)
    later = contexts.step({request: [5] for request in PROMPTS})
    return {request: torch.cat((first[request], later[request])) for request in PROMPTS}


def assert_same(whole: torch.Tensor, quantized: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that logits are equal, or differ as much as those of two instruction sets do in bf16."""
    if rounds_blocks(select_kernels(CPU), dtype):
        assert torch.equal(whole, quantized)
    else:
        assert (whole - quantized).norm() / whole.norm() < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("type_name", ["Q4_1", "Q8_0"])
def test_gguf_computes_the_bits_of_the_converted_model(
    save_converted: Callable[..., Path], paged_contexts: Any, type_name: str, dtype: torch.dtype
) -> None:
    folder = save_converted(type_name)
    matrices = read_reference(folder).matrices
    assert {matrix.type_name for matrix in matrices.values()} == {type_name}
    assert len(matrices) == 2 + 3 * 7
    whole, quantized = (logits(load(folder, how, dtype), paged_contexts, dtype) for how in ("none", "gguf"))
    for request in PROMPTS:
        assert_same(whole[request], quantized[request], dtype)


def test_workers_share_blocks_that_were_decoded_once(
    save_converted: Callable[..., Path], paged_contexts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, packed = save_converted("Q4_1"), tmp_path / "packed"
    private, first = (logits(load(folder, "gguf", packed_dir=own), paged_contexts) for own in (None, packed))
    monkeypatch.setattr(BlockMatrix, "decode", None)
    monkeypatch.setattr(GgufFile, "read", None)  # no block is read either
    second = logits(load(folder, "gguf", packed_dir=packed), paged_contexts)
    for request in PROMPTS:
        assert torch.equal(private[request], first[request])
        assert torch.equal(private[request], second[request])


def test_experts_keep_their_blocks(tmp_path: Path, save_qwen3_moe: Any, paged_contexts: Any) -> None:
    reference = save_qwen3_moe(
        vocab_size=261, hidden_size=64, head_dim=32, num_attention_heads=4, moe_intermediate_size=32, mlp_only_layers=[]
    )
    source = write_gguf(
        tmp_path / "tiny.gguf", reference, "qwen3moe", "qwen2", quantized=gguf.GGMLQuantizationType["Q8_0"]
    )
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(source, folder)
    # Routers are among them: the file has them in fp32.
    assert len(read_reference(folder).matrices) == 2 + 3 * (5 + 3 * reference.config.num_experts)
    whole, quantized = (
        logits(load(folder, how, torch.float32), paged_contexts, torch.float32) for how in ("none", "gguf")
    )
    original = logits(load(tmp_path, "none", torch.float32), paged_contexts, torch.float32)
    for request in PROMPTS:
        assert torch.equal(whole[request], quantized[request])
        assert (whole[request] - original[request]).norm() / original[request].norm() < 0.05


def test_int8_is_near_the_whole_model_on_every_backend(
    save_converted: Callable[..., Path], paged_contexts: Any
) -> None:
    folder = save_converted()
    whole = logits(load(folder, "none", torch.float32), paged_contexts, torch.float32)
    for kernels in ("native", "reference"):
        rounded = logits(load(folder, "int8", torch.float32, kernels), paged_contexts, torch.float32)
        for request in PROMPTS:
            error = (rounded[request] - whole[request]).norm() / whole[request].norm()
            assert 0 < error < 0.05


def test_int8_is_near_a_whole_model_with_matrices_of_heads(
    tmp_path: Path, save_deepseek_v2: Any, paged_contexts: Any
) -> None:
    save_deepseek_v2(first_k_dense_replace=3)
    whole, rounded = (logits(load(tmp_path, how, torch.float32), paged_contexts, torch.float32)
                      for how in ("none", "int8"))  # fmt: skip
    for request in PROMPTS:
        assert 0 < (rounded[request] - whole[request]).norm() < 0.05 * whole[request].norm()


@pytest.mark.parametrize(
    ("family", "changes", "most"), [("granite_hybrid", {}, 0.2), ("qwen3_next", {"num_experts": 0}, 0.5)]
)
def test_int8_is_near_a_whole_hybrid(
    tmp_path: Path, request: pytest.FixtureRequest, paged_contexts: Any, family: str, changes: Any, most: float
) -> None:
    request.getfixturevalue(f"save_{family}")(vocab_size=256, **changes)
    models = [load(tmp_path, how, torch.float32) for how in ("none", "int8")]
    whole, rounded = (logits(model, paged_contexts, torch.float32) for model in models)
    for row in PROMPTS:
        error = (rounded[row] - whole[row]).norm() / whole[row].norm()
        assert 0 < error < most


def test_only_bits_that_differ_make_another_model(save_converted: Callable[..., Path]) -> None:
    folder = save_converted()
    whole, blocks, rounded = (model_identity(folder, "torch.bfloat16", how) for how in ("none", "gguf", "int8"))
    assert whole == blocks != rounded


@pytest.mark.parametrize("type_name", ["F32", "F16"])
def test_a_file_without_quantized_matrices_is_computed_whole(
    save_converted: Callable[..., Path], paged_contexts: Any, type_name: str
) -> None:
    folder = save_converted(type_name)
    blocks, whole = (logits(load(folder, how), paged_contexts, torch.bfloat16) for how in ("gguf", "none"))
    assert all(torch.equal(blocks[request], whole[request]) for request in PROMPTS)


def test_a_folder_without_blocks_is_told_apart(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    with pytest.raises(ConfigError, match=r"was not converted from a GGUF file.*--quantization int8"):
        load(tmp_path, "gguf")


def test_an_unknown_way_is_refused(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    with pytest.raises(ConfigError, match="must be auto, none, int8, int4, fp8, mxfp8, mxfp4 or gguf, not 'fp6'"):
        load(tmp_path, "fp6")


def test_a_reference_that_does_not_fit_is_named(save_converted: Callable[..., Path]) -> None:
    folder, name = save_converted(), "model.layers.1.mlp.up_proj.weight"
    reference = read_reference(folder)
    matrix = reference.matrices[name]
    replace(reference, matrices={**reference.matrices, name: replace(matrix, shape=(96, 96))}).write(folder)
    with pytest.raises(
        ModelError, match=r"does not fit config\.json: model\.layers\.1\.mlp\.up_proj\.weight is \[96, 96\]"
    ):
        load(folder, "gguf")
    moved = replace(matrix, places=((0, (folder / "weights.gguf").stat().st_size - 32),))
    replace(reference, matrices={**reference.matrices, name: moved}).write(folder)
    with pytest.raises(ModelError, match=r"weights\.gguf is damaged"):
        load(folder, "gguf")
    (folder / REFERENCE_FILE).write_bytes(b"damaged")
    with pytest.raises(ModelError, match=rf"{REFERENCE_FILE} cannot be read .*converts the GGUF file again"):
        load(folder, "gguf")


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_of_four_bits_gives_the_same_logits(real_model: Callable[..., Path], paged_contexts: Any) -> None:
    folder = real_model("smollm2-135m-instruct", "gguf")
    prompt = list(range(1000, 1050))
    whole, quantized = (paged_contexts(load(folder, how), 1, 128, torch.bfloat16) for how in ("none", "gguf"))
    tokens = prompt
    for _ in range(24):
        expected, step = whole.step({0: tokens})[0], quantized.step({0: tokens})[0]
        assert_same(expected, step, torch.bfloat16)
        tokens = [int(expected[-1].argmax())]
    assert len(read_reference(folder).matrices) == 211
