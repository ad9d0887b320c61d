"""Models with adapters give the logits of `transformers` with the adapters merged, and rows do not mix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels import select_kernels
from paceline.kernels.interface import Kernels
from paceline.kernels.native import NativeKernels
from paceline.models.adapters.loading import AdapterRules
from paceline.models.compiled import CompiledModel
from paceline.models.loader import AdapterChoice, load_model
from tests.adapters import ALL, merged, write_adapter
from tests.tiny_checkpoints import write_tiny

CPU = torch.device("cpu")
PROMPT = [(7 * index * index + 3) % 97 for index in range(40)]

FAMILIES: dict[str, Sequence[str]] = {
    "llama": ALL,
    "qwen3": ALL,
    "gemma3": ALL,
    "ministral3": ALL,
    "granite_hybrid": ("q_proj", "v_proj", "in_proj", "out_proj", "input_linear", "output_linear"),
    "qwen3_5": (*ALL, "in_proj_qkv", "in_proj_z", "out_proj"),
    "deepseek_v3": ("q_a_proj", "o_proj"),
    "gemma4": ("q_proj", "o_proj", "down_proj", "per_layer_input_gate"),
}
"""The adapted modules of each family. Some are parts of fused matrices, and some have outputs in another order."""


def load_adapted(folder: Path, kernels: Kernels | None = None, dtype: torch.dtype = torch.float32) -> CompiledModel:
    choice = AdapterChoice(3, AdapterRules(most_rank=8), dtype)
    model = load_model(folder, dtype, kernels or select_kernels(CPU, "native"), CPU, adapters=choice)
    assert isinstance(model, CompiledModel)
    return model


def place(model: CompiledModel, *folders: Path) -> list[object]:
    """Put adapters into the slots 0, 1, …. Return what keeps them in memory."""
    assert model.adapters is not None
    loaded = [model.adapters.read(folder) for folder in folders]
    for slot, adapter in enumerate(loaded):
        model.adapters.place(slot, adapter.digest)
    return list(loaded)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_merged_weights(family: str, tmp_path: Path, paged_contexts: Any) -> None:
    reference = write_tiny(tmp_path / "model", family)
    folder = write_adapter(tmp_path / "adapter", reference, FAMILIES[family])
    model = load_adapted(tmp_path / "model")
    place(model, folder)
    contexts = paged_contexts(model, 2, 64)
    contexts.adapters = {0: 0}
    found = contexts.step({0: PROMPT, 1: PROMPT})
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        adapted, plain = (own(ids).logits[0] for own in (merged(reference, folder), reference))
    assert (adapted - plain).abs().max() > 0.1
    torch.testing.assert_close(found[0], adapted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1], plain, rtol=1e-3, atol=1e-3)


PATTERNS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "root scale": ({"use_rslora": True}, dict.fromkeys(ALL, 4.0)),
    "patterns": (
        {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 8}, "alpha_pattern": {"self_attn.q_proj": 3}},
        {**dict.fromkeys(ALL, 2.0), "q_proj": 1.5},
    ),
    "bias": ({"lora_bias": True}, dict.fromkeys(ALL, 2.0)),
    "some layers": ({"layers_to_transform": [0, 2], "layers": r"layers\.[02]\."}, dict.fromkeys(ALL, 2.0)),
    "regular expression": (
        {"target_modules": r".*\.(q|down)_proj", "modules": ("q_proj", "down_proj")},
        dict.fromkeys(ALL, 2.0),
    ),
    "excluded": (
        {"target_modules": "all-linear", "exclude_modules": ["q_proj", "lm_head"], "modules": ALL[1:]},
        dict.fromkeys(ALL, 2.0),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_settings_of_peft(name: str, tmp_path: Path, paged_contexts: Any) -> None:
    settings, scales = PATTERNS[name]
    reference = write_tiny(tmp_path / "model", "llama")
    folder = write_adapter(tmp_path / "adapter", reference, **{"modules": ALL, **settings})
    if name == "patterns":  # in layer 1, the rank of up_proj is twice that of the others, with the same alpha
        scales = {**scales, "up_proj": 2.0}
    model = load_adapted(tmp_path / "model")
    place(model, folder)
    contexts = paged_contexts(model, 1, 64)
    contexts.adapters = {0: 0}
    found = contexts.step({0: PROMPT})[0]
    changed = merged(reference, folder, scales)
    if name == "patterns":
        _halve_second_layer(changed, reference)
    with torch.inference_mode():
        wanted = changed(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def _halve_second_layer(changed: Any, reference: Any) -> None:
    """Give up_proj of layer 1 the scale 1 instead of 2."""
    new, old = (each.model.layers[1].mlp.up_proj.weight for each in (changed, reference))
    with torch.no_grad():
        new.copy_((new + old) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_row_has_the_same_bits_in_any_mix_of_adapters(
    family: str, tmp_path: Path, paged_contexts: Any, set_threads: Callable[[int], None]
) -> None:
    reference = write_tiny(tmp_path / "model", family, torch.bfloat16)
    folders = [write_adapter(tmp_path / str(seed), reference, seed=seed, rank=seed + 3) for seed in range(3)]
    results: dict[int, list[Tensor]] = {slot: [] for slot in (-1, 0, 1, 2)}
    for threads in (1, 2):
        model = load_adapted(tmp_path / "model", NativeKernels(threads), torch.bfloat16)
        kept = place(model, *folders)
        for slot in results:
            contexts = paged_contexts(model, 1, 64, torch.bfloat16)
            contexts.adapters = {0: slot} if slot >= 0 else {}
            results[slot].append(torch.cat([contexts.step({0: [token]})[0] for token in PROMPT]))
        contexts = paged_contexts(model, 4, 64, torch.bfloat16)
        contexts.adapters = {0: 0, 1: 1, 3: 2}
        steps = [contexts.step({0: PROMPT[:30], 1: PROMPT[:7], 2: PROMPT[:1], 3: PROMPT[:20]})]
        steps.append(contexts.step({3: PROMPT[20:], 0: PROMPT[30:], 2: PROMPT[1:], 1: PROMPT[7:]}))
        for request, slot in enumerate((0, 1, -1, 2)):
            results[slot].append(torch.cat([step[request] for step in steps]))
        del kept
    for own in results.values():
        for result in own[1:]:
            assert torch.equal(result, own[0])
    assert len({tuple(own[0][-1].tolist()) for own in results.values()}) == 4


@pytest.mark.slow
def test_layers_without_kv_adapt_the_rows_of_wanted_tokens(tmp_path: Path, paged_contexts: Any) -> None:
    reference = write_tiny(tmp_path / "model", "gemma4")
    folders = [write_adapter(tmp_path / str(seed), reference, ("q_proj",), seed=seed) for seed in range(2)]
    model = load_adapted(tmp_path / "model")
    kept = place(model, *folders)
    results = []
    for wanted in (None, {0: 1, 1: 2, 2: 1}):
        contexts = paged_contexts(model, 3, 64)
        contexts.adapters = {0: 0, 2: 1}
        results.append(contexts.step(dict.fromkeys(range(3), PROMPT), wanted=wanted))
    for request, own in results[1].items():
        assert torch.equal(own, results[0][request][-len(own) :])
    del kept


def test_a_slot_takes_another_adapter(tmp_path: Path, paged_contexts: Any) -> None:
    reference = write_tiny(tmp_path / "model", "llama")
    folders = [write_adapter(tmp_path / str(seed), reference, ("q_proj",), seed=seed, size=9.0) for seed in range(2)]
    model = load_adapted(tmp_path / "model")
    found = []
    for folder in (*folders, folders[0]):
        place(model, folder)
        contexts = paged_contexts(model, 1, 64)
        contexts.adapters = {0: 0}
        found.append(contexts.step({0: PROMPT[:5]})[0])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_a_check_of_an_adapter_in_use_leaves_it_there(tmp_path: Path) -> None:
    reference = write_tiny(tmp_path / "model", "llama")
    folder = write_adapter(tmp_path / "adapter", reference, ALL)
    model = load_adapted(tmp_path / "model")
    assert model.adapters is not None
    kept = model.adapters.read(folder)
    digest = model.adapters.read(folder).digest  # as of another name with equal content, or of another gateway
    model.adapters.place(0, digest)
    assert kept.digest == digest
