"""The forms in which checkpoints of Gemma 4 come, its tables, and prompts that stop before layers without KV."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from paceline.core.errors import ModelError
from paceline.kernels import select_kernels
from paceline.kernels.interface import Kernels, Taps
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import instruction_sets
from paceline.models.base import Model
from paceline.models.config import read_config
from paceline.models.loader import load_model
from tests.models.test_model_logits import check_against_reference, random_tokens, reference_logits, same
from tests.tiny_checkpoints import write_gemma4_unified, write_gemma4_with_media, write_tiny

CPU = torch.device("cpu")
TABLE = "model.embed_tokens_per_layer.weight"


def load(folder: Path, kernels: Kernels | None = None, **options: Any) -> Model:
    return load_model(folder, torch.float32, kernels or NativeKernels(2), CPU, **options)


def change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config.get("text_config", config))
    file.write_text(json.dumps(config))


def as_released(text: dict[str, Any]) -> None:
    """Write the sizes of full layers as released checkpoints do."""
    own = next(iter(text.pop("per_layer_config").values()))
    text["global_head_dim"] = own["head_dim"]
    text["num_global_key_value_heads"] = own.get("num_key_value_heads")


@pytest.mark.parametrize("kind", ["edge", "experts"])
def test_the_text_part_of_a_model_for_several_media(
    tmp_path: Path, paged_contexts: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    reference = write_gemma4_with_media(tmp_path, kind, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    with caplog.at_level(logging.INFO):
        model = load(tmp_path)
    assert "are not used by this model: model." in caplog.text
    check_against_reference(reference, model, paged_contexts, tolerance=1e-4)


@pytest.mark.parametrize("architecture", ["Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"])
def test_the_unified_model(tmp_path: Path, paged_contexts: Any, architecture: str) -> None:
    reference = write_gemma4_unified(tmp_path)
    if architecture == "Gemma4UnifiedForCausalLM":
        own = transformers.Gemma4UnifiedForCausalLM(reference.config.text_config)
        own.model.load_state_dict(reference.model.language_model.state_dict())
        own.tie_weights()
        own.save_pretrained(tmp_path)
    check_against_reference(reference, load(tmp_path), paged_contexts, tolerance=1e-4)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_dense"])
def test_released_configs_are_read_like_those_of_transformers(tmp_path: Path, family: str) -> None:
    write_tiny(tmp_path, family)
    before = read_config(tmp_path)
    change_config(tmp_path, as_released)
    assert read_config(tmp_path) == before


def test_keys_and_values_of_layers_that_read_others_are_ignored(tmp_path: Path) -> None:
    write_tiny(tmp_path, "gemma4")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    surplus = {f"model.layers.5.self_attn.{name}_proj.weight": torch.zeros(64, 40) for name in "kv"}
    save_file({**tensors, **surplus, "model.layers.5.self_attn.k_norm.weight": torch.zeros(32)}, file)
    load(tmp_path)
    save_file({**tensors, "model.layers.2.self_attn.other_proj.weight": torch.zeros(64, 40)}, file)
    with pytest.raises(ModelError, match=r"unexpected tensors: model\.layers\.2\.self_attn\.other_proj\.weight"):
        load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, "gemma4")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in (TABLE, "model.layers.1.layer_scalar", "model.per_layer_projection_norm.weight"):
        save_file({own: tensor for own, tensor in tensors.items() if own != name}, file)
        with pytest.raises(ModelError, match=f"missing tensors: {name}"):
            load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_the_table_are_read_from_the_checkpoint(
    tmp_path: Path, paged_contexts: Any, dtype: torch.dtype
) -> None:
    write_tiny(tmp_path, "gemma4")
    packed = tmp_path / "packed"
    model = load_model(tmp_path, dtype, NativeKernels(2), CPU, packed)
    (tokens,) = random_tokens(103, 30)
    before = paged_contexts(model, 1, 30, dtype).step({0: tokens})[0]
    names = b"".join(file.read_bytes() for file in packed.glob("*.shards/*"))  # beside other bytes
    assert b"model.embed_tokens.weight" in names
    assert b"embed_tokens_per_layer" not in names
    # The tokens' rows, and no others, are read from the file whenever they are needed.
    with (tmp_path / "model.safetensors").open("r+b") as raw:
        header = int.from_bytes(raw.read(8), "little")
        begin, _ = json.loads(raw.read(header))[TABLE]["data_offsets"]
        for token in set(range(103)) - set(tokens):
            raw.seek(8 + header + begin + token * 48 * 4)
            raw.write(b"\xff" * 48 * 4)
    assert torch.equal(paged_contexts(model, 1, 30, dtype).step({0: tokens})[0], before)
    other = next(token for token in range(103) if token not in tokens)
    assert paged_contexts(model, 1, 30, dtype).step({0: [other]})[0].isnan().all()


def test_matrices_can_be_quantized(tmp_path: Path, paged_contexts: Any) -> None:
    reference = write_tiny(tmp_path, "gemma4")
    (tokens,) = random_tokens(103, 20)
    found = paged_contexts(load(tmp_path, quantization="int8"), 1, 30).step({0: tokens})[0]
    assert (found - reference_logits(reference, tokens)).abs().mean() < 0.1


def check_early_stop(model: Model, paged_contexts: Any, dtype: torch.dtype) -> None:
    """Compare logits of some tokens of mixed batches with those of all tokens."""
    first, second, third = random_tokens(100, 70, 40, 33)
    whole, early = (paged_contexts(model, 3, 128, dtype) for _ in range(2))
    steps: list[tuple[dict[int, list[int]], dict[int, int]]] = [
        ({0: first[:50], 1: second[:9]}, {0: 0, 1: 0}),
        ({0: first[50:51], 1: second[9:30], 2: third[:20]}, {0: 1, 1: 3, 2: 0}),
        ({1: second[30:31], 0: first[51:52]}, {1: 1, 0: 1}),
        ({2: third[20:], 0: first[52:], 1: second[31:40]}, {2: 13, 0: 0, 1: 1}),
    ]
    for tokens, wanted in steps:
        expected = whole.step(tokens)
        found = early.step(tokens, wanted=wanted)
        for request, count in wanted.items():
            assert expected[request].isfinite().all()
            assert torch.equal(found[request], expected[request][len(tokens[request]) - count :])


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_tokens_that_stop_early_change_no_bit(tmp_path: Path, paged_contexts: Any, instruction_set: str) -> None:
    write_tiny(tmp_path, "gemma4")
    model = load_model(tmp_path, torch.bfloat16, NativeKernels(2, instruction_set), CPU)
    check_early_stop(model, paged_contexts, torch.bfloat16)


# Rows that pad a step have arbitrary content, about which numpy warns in Triton's interpreter.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow ", "ignore:invalid value ", "ignore:divide by zero ")
def test_tokens_stop_early_on_a_gpu_too(tmp_path: Path, paged_contexts: Any) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    few: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    few |= {"num_attention_heads": 2, "num_key_value_heads": 1}  # Triton's interpreter is slow
    reference = write_tiny(tmp_path, "gemma4", **few, num_kv_shared_layers=2)
    contexts = paged_contexts(load(tmp_path, select_kernels(CPU, "triton-invariant")), 2, 64)
    first, second = random_tokens(100, 7, 2)
    contexts.step({0: first[:5]}, wanted={0: 0})
    found = contexts.step({0: first[5:], 1: second}, wanted={0: 2, 1: 1})
    same(found[0], reference_logits(reference, first)[5:], tolerance=1e-4)
    same(found[1], reference_logits(reference, second)[1:], tolerance=1e-4)


def test_other_models_too_return_only_what_is_wanted(tmp_path: Path, save_llama: Any, paged_contexts: Any) -> None:
    save_llama()
    check_early_stop(load(tmp_path), paged_contexts, torch.float32)


class Watched(NativeKernels):
    """Native kernels that tell how many rows have gone through each attention, and do not record a pass."""

    def __init__(self) -> None:
        super().__init__(1)
        self.rows: list[int] = []

    def compile(self, forward: Any) -> Any:
        return forward

    def attention(self, queries: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        self.rows.append(len(queries))
        return super().attention(queries, *rest, **options)


def test_only_wanted_tokens_go_through_layers_without_kv(tmp_path: Path, paged_contexts: Any) -> None:
    write_tiny(tmp_path, "gemma4")
    kernels = Watched()
    contexts = paged_contexts(load(tmp_path, kernels), 1, 128)
    (tokens,) = random_tokens(103, 40)
    found = []
    # Hidden states after the layers that store KV change nothing; those after later layers are needed of all tokens.
    for count, taps in ((0, None), (2, None), (2, Taps((0, 3))), (2, Taps((4,))), (10, None)):
        kernels.rows.clear()
        contexts.step({0: tokens[:10]}, taps, {0: count})
        found.append(list(kernels.rows))
        assert taps is None or all(len(taps.states[depth]) == 10 for depth in taps.depths)
    assert found == [[10] * 3, [10] * 3 + [2] * 3, [10] * 3 + [2] * 3, [10] * 6, [10] * 6]


def test_groups_name_the_layers_that_read(tmp_path: Path) -> None:
    write_tiny(tmp_path, "gemma4")
    model = load(tmp_path)
    assert [(shape.name, shape.layers, shape.readers) for shape in model.group_shapes] == [
        ("sliding", (0, 1), ((3, 1), (4, 1))),
        ("full", (2,), ((5, 2),)),
    ]
    assert [(shape.kv_heads, shape.head_dim, shape.window) for shape in model.group_shapes] == [(2, 16, 8), (2, 32, 0)]
    assert model.layer_groups == (0, 0, 1, 0, 0, 1)
