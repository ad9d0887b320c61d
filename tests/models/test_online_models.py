"""Models whose matrices are rounded when they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.core.online_quantization import ONLINE_FORMATS, OnlineQuantization, read_online_quantization
from paceline.kernels import select_kernels
from paceline.kernels.quantized import QuantizedMatrix
from paceline.kernels.rounding import round_matrix
from paceline.models.config import weight_form
from paceline.models.identity import model_identity
from paceline.models.loader import load_model

CPU = torch.device("cpu")
PROMPTS = {0: list(range(3, 60)), 1: [7, 8, 9], 2: [30]}
MOE = {"vocab_size": 261, "hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "moe_intermediate_size": 32}


def logits(
    folder: Path,
    paged_contexts: Any,
    quantization: Any,
    kernels: str = "native",
    packed_dir: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the logits of three prompts and of a further token of each."""
    model = load_model(folder, dtype, select_kernels(CPU, kernels), CPU, packed_dir, quantization)
    contexts = paged_contexts(model, len(PROMPTS), 128, dtype)
    first = contexts.step(PROMPTS)
    later = contexts.step({request: [5] for request in PROMPTS})
    return torch.cat([torch.cat((first[request], later[request])) for request in PROMPTS])


def round_file(folder: Path, chosen: OnlineQuantization) -> None:
    """Round the matrices of a checkpoint on the disk, as the choice says."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        is_matrix = tensor.dim() > 1 and not name.endswith((".gate.weight", "router.layer.weight"))
        found = chosen.format_of(name) if is_matrix else None
        if found is not None:
            parts = tensor.float() if tensor.dim() == 3 else tensor.float()[None]
            whole = [round_matrix(part, found) for part in parts]
            rounded = [each.dequantize() if isinstance(each, QuantizedMatrix) else each for each in whole]
            tensors[name] = torch.stack(rounded).view(tensor.shape)
    save_file(tensors, file)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "dtype": "float32"}))


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("form", ONLINE_FORMATS)
def test_logits_are_those_of_the_rounded_checkpoint(
    tmp_path: Path, save_llama: Any, paged_contexts: Any, form: Any, kernels: str
) -> None:
    save_llama(vocab_size=261, hidden_size=96, intermediate_size=160)
    online = logits(tmp_path, paged_contexts, form, kernels)
    round_file(tmp_path, OnlineQuantization.of(form))
    assert torch.equal(online, logits(tmp_path, paged_contexts, "none", kernels))


def test_experts_and_linear_layers_are_rounded_as_chosen(
    tmp_path: Path, save_qwen3_moe: Any, paged_contexts: Any
) -> None:
    save_qwen3_moe(mlp_only_layers=[], **MOE)
    text = '{"linear": "mxfp8", "moe": "int4", "ignore": ["re:.*layers.0.self_attn", "*layers.1.mlp.experts*"]}'
    chosen = read_online_quantization("auto", text)
    assert chosen is not None
    online = logits(tmp_path, paged_contexts, chosen)
    plain = logits(tmp_path, paged_contexts, "none")
    round_file(tmp_path, chosen)
    assert torch.equal(online, logits(tmp_path, paged_contexts, "none"))
    assert not torch.equal(online, plain)


def test_fused_experts_are_rounded_one_by_one(tmp_path: Path, save_granite_moe: Any, paged_contexts: Any) -> None:
    save_granite_moe(vocab_size=256)
    chosen = read_online_quantization("auto", '{"moe": "mxfp4"}')
    assert chosen is not None
    online = logits(tmp_path, paged_contexts, chosen)
    plain = logits(tmp_path, paged_contexts, "none")
    round_file(tmp_path, chosen)
    assert torch.equal(online, logits(tmp_path, paged_contexts, "none"))
    assert not torch.equal(online, plain)


@pytest.mark.parametrize("form", ONLINE_FORMATS)
def test_workers_share_rounded_weights(tmp_path: Path, save_llama: Any, paged_contexts: Any, form: Any,
                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    save_llama(vocab_size=261, hidden_size=96, intermediate_size=160)
    packed = tmp_path / "packed"
    own, first = (logits(tmp_path, paged_contexts, form, packed_dir=folder, dtype=torch.bfloat16)
                  for folder in (None, packed))  # fmt: skip
    monkeypatch.setattr("paceline.models.packing.quantized.round_matrix", None)
    second = logits(tmp_path, paged_contexts, form, packed_dir=packed, dtype=torch.bfloat16)
    assert torch.equal(own, first)
    assert torch.equal(own, second)


def test_each_choice_has_a_folder_of_packed_weights(tmp_path: Path, save_llama: Any, paged_contexts: Any) -> None:
    save_llama(vocab_size=261, hidden_size=96, intermediate_size=160)
    packed = tmp_path / "packed"
    choices = ["fp8", "mxfp8", *(read_online_quantization("fp8", json.dumps({"ignore": [name]})) for name in "ab")]
    found = [logits(tmp_path, paged_contexts, each, packed_dir=packed) for each in choices]
    assert torch.equal(found[0], found[2])  # what is ignored does not exist
    assert not torch.equal(found[0], found[1])
    assert len({model_identity(tmp_path, "bfloat16", each).digest for each in choices}) == len(choices)


def test_each_format_is_another_model_with_the_same_weights_on_the_disk(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    identities = [model_identity(tmp_path, "bfloat16", form) for form in ("none", *ONLINE_FORMATS)]
    assert len({identity.digest for identity in identities}) == len(identities)
    assert len({identity.weights for identity in identities}) == 1
    assert [identity.quantization for identity in identities] == ["none", *ONLINE_FORMATS]


@pytest.mark.parametrize("form", ["fp8", "mxfp8", "mxfp4", "int4"])
def test_quantized_matrices_are_not_rounded_again(tmp_path: Path, save_llama: Any, form: Any) -> None:
    save_llama()
    settings = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "quantization_config": quantization}))
    save_file({"model.layers.0.mlp.down_proj.qweight": torch.zeros(4, 4).int()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"quantized as GPTQ already, and rounding them to {form} would lose more"):
        weight_form(tmp_path, form)
    assert str(weight_form(tmp_path, "int8")) == "int8"


def resident(name: str) -> int:
    """Return the bytes of the file of this name that are mapped and in the memory of this process."""
    total, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            is_file = line.endswith(name)
        elif first == "Rss:" and is_file:
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system has no list of maps")
@pytest.mark.parametrize(("family", "hidden_size"), [("llama", 96), ("granite_moe", 64)])
def test_a_checkpoint_leaves_memory_while_it_is_packed(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, family: str, hidden_size: int
) -> None:
    request.getfixturevalue(f"save_{family}")(vocab_size=256, hidden_size=hidden_size, intermediate_size=8192)
    seen = []

    def rounded(weight: Tensor, form: Any) -> Any:
        found = round_matrix(weight, form)
        seen.append(resident("/model.safetensors"))
        return found

    monkeypatch.setattr("paceline.models.packing.quantized.round_matrix", rounded)
    load_model(tmp_path, torch.float32, select_kernels(CPU), CPU, quantization="int4")
    assert len(seen) > 10
    assert max(seen) < (tmp_path / "model.safetensors").stat().st_size / 3
