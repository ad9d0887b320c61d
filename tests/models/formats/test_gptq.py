"""Matrices of GPTQ, which this file packs as GPTQModel's layers do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.kernels import select_kernels
from paceline.models.formats import Codes, find_format
from paceline.models.loader import load_model
from tests.models.formats.stored import decoded, store
from tests.models.test_model_logits import check_against_reference

CPU = torch.device("cpu")


def config_of(bits: int = 4, group_size: int = 32, layout: str = "gptq", sym: bool = False) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "checkpoint_format": layout,
        "sym": sym,
        "desc_act": False,
    }


def words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [rows, columns] into words along the rows: [rows * bits / 32, columns]."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -codes.shape[0] % per_word))
    pieces = padded.view(-1, per_word, codes.shape[1]).long()
    packed = sum(pieces[:, place] << bits * place for place in range(per_word))
    return torch.as_tensor(packed).to(torch.int32)


def pack(
    weight: Tensor,
    bits: int = 4,
    group: int = 32,
    layout: str = "gptq",
    sym: bool = False,
    order: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> tuple[Mapping[str, Tensor], Tensor]:
    """Quantize a matrix [out, in]. `order`: the group of each input; None for groups of inputs in a row."""
    size_out, size_in = weight.shape
    group = size_in if group == -1 else group
    places = torch.arange(size_in) // group if order is None else order
    generator = torch.Generator().manual_seed(size_in)
    groups, most = size_in // group, (1 << bits) - 1
    # Zeros of version 1 are from 1 to 2 ** bits, because it stores them minus one.
    least, end = (0, most + 1) if layout == "gptq_v2" else (1, most + 1)
    zeros = torch.randint(least, end, (groups, size_out), generator=generator)
    if sym:
        zeros[:] = 1 << bits - 1
    scales = (torch.rand(groups, size_out, generator=generator) * 0.02 + 0.001).to(dtype)
    codes = (weight.T.float() / scales[places].float() + zeros[places]).round().clamp(0, most).long()
    whole = ((codes - zeros[places]).to(dtype) * scales[places]).T
    stored_zeros = zeros - int(layout == "gptq")
    parts = {
        "qweight": words(codes, bits),
        "qzeros": words(stored_zeros.T, bits).T.contiguous(),
        "scales": scales,
        "g_idx": places.int(),
    }
    return parts, whole


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (4, -1), (8, 64), (8, -1)])
def test_each_weight_is_that_of_the_library(bits: int, group: int, sym: bool, layout: str, dtype: torch.dtype) -> None:
    weight = torch.randn(80, 256, generator=torch.Generator().manual_seed(3)) * 0.05
    tensors, expected = pack(weight, bits, group, layout, sym, dtype=dtype)
    config = config_of(bits, group, layout, sym)
    assert torch.equal(decoded(config, tensors, (80, 256)), expected.float())
    found = find_format({"quantization_config": config})
    assert found is not None
    codes = found.decode("m", tensors, (80, 256))
    assert isinstance(codes, Codes)
    assert (codes.offsets is None) == sym


def test_a_zero_of_0_in_version_1_borrows_from_the_next_code() -> None:
    weight = torch.randn(80, 64, generator=torch.Generator().manual_seed(3)) * 0.05
    tensors, expected = pack(weight, layout="gptq_v2")
    stored = tensors["qzeros"].long() - 0x11111111
    first = {**tensors, "qzeros": stored.to(torch.int32)}
    assert torch.equal(decoded(config_of(layout="gptq"), first, (80, 64)), expected.float())


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_of_version_2_under_the_name_of_version_1_are_seen_in_symmetric_matrices(bits: int) -> None:
    weight = torch.randn(80, 64, generator=torch.Generator().manual_seed(3)) * 0.05
    tensors, expected = pack(weight, bits, layout="gptq_v2", sym=True)
    assert torch.equal(decoded(config_of(bits, layout="gptq", sym=True), tensors, (80, 64)), expected.float())


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_in_any_order_of_inputs(bits: int) -> None:
    weight = torch.randn(80, 128, generator=torch.Generator().manual_seed(3)) * 0.05
    order = (torch.arange(128) // 32)[torch.randperm(128, generator=torch.Generator().manual_seed(4))]
    tensors, expected = pack(weight, bits, order=order)
    config = {**config_of(bits), "desc_act": True}
    assert torch.equal(decoded(config, tensors, (80, 128)), expected.float())
    wrong = {**tensors, "g_idx": order.int() + 1}
    with pytest.raises(ModelError, match=r"m\.g_idx names groups outside of 0 to 3"):
        decoded(config, wrong, (80, 128))


def test_groups_without_an_order_are_in_a_row() -> None:
    weight = torch.randn(80, 128, generator=torch.Generator().manual_seed(3)) * 0.05
    tensors, expected = pack(weight)
    for order in ({}, {"g_idx": torch.zeros(128, dtype=torch.int32)}):
        parts = {name: tensor for name, tensor in tensors.items() if name != "g_idx"} | order
        assert torch.equal(decoded(config_of(), parts, (80, 128)), expected.float())


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_bias_that_the_model_lacks_must_be_zero(tmp_path: Path, save_llama: Any, value: float) -> None:
    reference = save_llama(hidden_size=96, intermediate_size=192)
    config = {**config_of(), "dynamic": {"-:.*lm_head.*": {}}}

    def with_bias(_: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        tensors, whole = pack(weight)
        return {**tensors, "bias": torch.full((len(weight),), value)}, whole

    store(tmp_path, reference, config, with_bias)
    refused = pytest.raises(ModelError, match=r"unexpected tensors: .*\.bias") if value else contextlib.nullcontext()
    with refused:
        load_model(tmp_path, torch.float32, select_kernels(CPU), CPU)


@pytest.mark.parametrize("quantization", ["auto", "none"])
@pytest.mark.parametrize("bits", [4, 8])
def test_logits_are_those_of_transformers(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, bits: int, quantization: Any
) -> None:
    reference = save_llama(hidden_size=96, intermediate_size=192)
    store(tmp_path, reference, config_of(bits), lambda _, weight: pack(weight, bits))
    model = load_model(tmp_path, torch.float32, select_kernels(CPU), CPU, quantization=quantization)
    check_against_reference(reference, model, paged_contexts)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bits": 3}, "in 3 bits; 4 and 8 are supported"),
        ({"checkpoint_format": "marlin"}, "the layout marlin; gptq and gptq_v2 are supported"),
        ({"dynamic": {"+:.*mlp.*": {"bits": 8}}}, "other settings for single layers"),
        ({"group_size": None}, "group_size is None, not a whole number"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        find_format({"quantization_config": {**config_of(), **changes}})
