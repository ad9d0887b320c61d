"""Matrices that the library compressed-tensors has stored mean what the library says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.kernels import select_kernels
from paceline.kernels.quantized import round_to_bytes
from paceline.kernels.reference import ReferenceKernels
from paceline.models.config import rounds_input
from paceline.models.formats import find_format
from paceline.models.formats.compressed_tensors import CompressedTensors
from paceline.models.loader import load_model
from tests.models.formats.stored import decoded, store
from tests.models.test_model_logits import check_against_reference

CPU = torch.device("cpu")
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "W4A16 of groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "W4A16 of large groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 96}),
    "W4A16 with zeros": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "W8A16 of rows": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "W8A16 with zeros": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "W8A8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "W8A8 of matrices": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "W8A8 with zeros": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "FP8 of matrices": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "FP8 of rows": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "FP8 of blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]},
    ),
    "MXFP8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "MXFP4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "NVFP4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
}


def config_of(name: str) -> dict[str, Any]:
    form, weights = SCHEMES[name]
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}, "format": form}
    if form in ("int-quantized", "float-quantized"):
        group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def compress(name: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    """Let the library quantize a matrix. Returns its tensors, and the weights that the library makes of them."""
    form, arguments = SCHEMES[name]
    args = QuantizationArgs(**{"type": "int", "symmetric": True, **arguments})
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    parts = {"weight": weight, **_scales(weight, args)}
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = compressor.compress(parts, scheme)
    return tensors, compressor.decompress(dict(tensors), scheme)["weight"]


def _scales(weight: Tensor, args: QuantizationArgs) -> dict[str, Tensor]:
    """Return scales, zeros and a scale of the matrix, from the least and the largest number of each part."""
    size_out, size_in = weight.shape
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif args.strategy == "channel":
        parts = weight.unsqueeze(1)
    elif args.strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -size_in % width, 0, -size_out % height))
        blocks = padded.view(padded.shape[0] // height, height, -1, width)
        parts = blocks.transpose(1, 2).flatten(2)
    else:
        parts = weight.view(size_out, -1, args.group_size)
    whole = None
    if args.strategy == "tensor_group":
        whole = torch.tensor([448.0 * 6 / float(weight.abs().max())])
    scales, zeros = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale=whole)
    found = {
        "weight_scale": scales.to(weight.dtype) if whole is None else scales,
        "weight_zero_point": zeros.to(torch.int8),
    }
    return found if whole is None else {**found, "weight_global_scale": whole}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_each_weight_is_that_of_the_library(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = (torch.randn(80, 192, generator=generator) + 0.3).to(dtype)
    tensors, expected = compress(name, weight)
    assert torch.equal(decoded(config_of(name), tensors, (80, 192)), expected.float())


@pytest.mark.parametrize("name", ["W4A16 of groups", "W4A16 with zeros", "W8A16 of rows", "FP8 of blocks", "NVFP4"])
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_logits_are_those_of_transformers(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, name: str, quantization: Any
) -> None:
    reference = save_llama(hidden_size=96, intermediate_size=192)
    store(tmp_path, reference, config_of(name), lambda _, weight: compress(name, weight.bfloat16()))
    model = load_model(tmp_path, torch.float32, select_kernels(CPU), CPU, quantization=quantization)
    check_against_reference(reference, model, paged_contexts)


class _RoundsInput(torch.nn.Module):
    """A linear layer of `transformers` whose input is rounded to bytes first, in plain torch."""

    def __init__(self, layer: torch.nn.Linear, fixed: float) -> None:
        super().__init__()
        self.weight, self._fixed = layer.weight, fixed

    def forward(self, x: Tensor) -> Tensor:
        values, scales = round_to_bytes(x.flatten(0, -2), self._fixed)
        return torch.nn.functional.linear((values * scales).view(x.shape), self.weight)


def test_inputs_are_rounded_if_the_format_says_so(tmp_path: Path, save_llama: Any, paged_contexts: Any) -> None:
    for fixed, dynamic in ((0.0, True), (0.03125, False)):
        reference = save_llama(hidden_size=96, intermediate_size=192)
        config = config_of("W8A8")
        activations = {"num_bits": 8, "type": "int", "strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
        config["config_groups"]["group_0"]["input_activations"] = activations

        def compressed(_: str, weight: Tensor, fixed: float = fixed) -> tuple[Mapping[str, Tensor], Tensor]:
            tensors, whole = compress("W8A8", weight)
            return {**tensors, **({"input_scale": torch.tensor([fixed])} if fixed else {})}, whole

        store(tmp_path, reference, config, compressed)
        for layer in [
            module for module in reference.modules() if type(module).__name__ in ("LlamaMLP", "LlamaAttention")
        ]:
            for name, linear in list(layer.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(layer, name, _RoundsInput(linear, fixed))
        for kernels in (select_kernels(CPU), ReferenceKernels()):
            model = load_model(tmp_path, torch.float32, kernels, CPU)
            # A number between two bytes may be rounded to either one, because earlier sums differ in the last bits.
            check_against_reference(reference, model, paged_contexts, 2e-2)
        exact = load_model(tmp_path, torch.float32, select_kernels(CPU), CPU, quantization="none")
        with pytest.raises(AssertionError):
            check_against_reference(reference, exact, paged_contexts, 1e-5)
        assert rounds_input(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"symmetric": False}, {"type": "float"}, {"num_bits": 4}, {"strategy": "group", "dynamic": True}]
)
def test_other_activations_stay_as_they_are(changes: dict[str, Any]) -> None:
    config = config_of("W8A8")
    config["config_groups"]["group_0"]["input_activations"].update(changes)
    found = find_format({"quantization_config": config})
    assert isinstance(found, CompressedTensors)
    assert not found.rounds_input


@pytest.mark.parametrize("scale", [0.0, float("nan"), -1.0])
def test_a_fixed_scale_that_is_none_is_refused(scale: float) -> None:
    config = config_of("W8A8")
    config["config_groups"]["group_0"]["input_activations"].update(dynamic=False, strategy="tensor")
    tensors = {**compress("W8A8", torch.randn(16, 32))[0], "input_scale": torch.tensor([scale])}
    with pytest.raises(ModelError, match=r"m\.input_scale is .*, not a scale"):
        decoded(config, tensors, (16, 32))


def test_names_come_before_patterns_and_patterns_before_kinds() -> None:
    def group(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": targets, "weights": {"num_bits": bits, "strategy": "channel"}, "format": "pack-quantized"}

    groups = {"a": group(8, "Linear"), "b": group(4, "re:.*mlp.*"), "c": group(8, "model.layers.0.mlp.up_proj")}
    groups = {name: {**each, "targets": list(each["targets"])} for name, each in groups.items()}
    found = find_format({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}})
    assert found is not None
    for matrix, words in (("self_attn.q_proj", 8), ("mlp.down_proj", 4), ("mlp.up_proj", 8)):
        assert found.tensors(f"model.layers.0.{matrix}", (16, 32))["packed"].shape == (16, words)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "the sparsity sparse-24-bitmask"),
        ({"transform_config": {"config_groups": {}}}, "transforms of activations"),
        ({"config_groups": {}}, "config_groups is empty"),
        ({"config_groups": {"a": {"targets": "Linear"}}}, "the targets of config group a"),
        (
            {"config_groups": {"a": {"targets": ["re:("], "weights": {"num_bits": 4}}}},
            r"'re:\(' is no regular expression",
        ),
        ({"config_groups": {"a": {"targets": ["lm_head"], "weights": {"num_bits": 4}}}}, "no config group names m"),
        (
            {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 3}}}},
            "type int in 3 bits by channel",
        ),
        ({"config_groups": ["a"]}, "config_groups is .*, not an object"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        decoded({**config_of("W4A16 of groups"), **changes}, {}, (16, 32))
