from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.kernels import select_kernels
from paceline.kernels.interface import Forward
from paceline.kernels.reference import ReferenceKernels
from paceline.models import checkpoint as checkpoint_module
from paceline.models.base import Model
from paceline.models.checkpoint import Checkpoint
from paceline.models.loader import load_model
from paceline.models.packing.quantized import Packer
from tests.tiny_checkpoints import write_qwen3_5_with_vision

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(folder, dtype, select_kernels(CPU), CPU)


def change_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Replace, add or (with None) remove tensors. "__" in a name means "."."""
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor | None] = {**load_file(file)}
    tensors.update({name.replace("__", "."): tensor for name, tensor in changes.items()})
    save_file({name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}, file)


def test_all_that_does_not_fit_is_named_at_once(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    change_tensors(tmp_path, model__norm__weight=None, lm_head__weight=torch.zeros(3, 4), model__adapter=torch.zeros(1))
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert "missing tensors: model.norm.weight" in str(caught.value)
    assert "lm_head.weight is [3, 4] instead of [101, 48]" in str(caught.value)
    assert "unexpected tensors: model.adapter" in str(caught.value)


@pytest.mark.parametrize("name", ["A_log", "D", "dt_bias", "in_proj__weight", "conv1d__weight", "conv1d__bias"])
def test_what_a_mamba_layer_lacks_is_named(tmp_path: Path, save_granite_hybrid: Any, name: str) -> None:
    save_granite_hybrid()
    change_tensors(tmp_path, **{f"model__layers__1__mamba__{name}": None})
    with pytest.raises(ModelError, match=f"missing tensors: model.layers.1.mamba.{name.replace('__', '.')}"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "norm__weight", "in_proj_ba__weight", "in_proj_qkvz__weight"])
def test_what_a_delta_layer_lacks_is_named(tmp_path: Path, save_qwen3_next: Any, name: str) -> None:
    save_qwen3_next()
    change_tensors(tmp_path, **{f"model__layers__2__linear_attn__{name}": None})
    with pytest.raises(ModelError, match=f"missing tensors: model.layers.2.linear_attn.{name.replace('__', '.')}"):
        load(tmp_path)


def test_tensors_that_the_text_model_does_not_read_may_be_there(tmp_path: Path) -> None:
    write_qwen3_5_with_vision(tmp_path)
    change_tensors(tmp_path, mtp__fc__weight=torch.zeros(3, 4))
    load(tmp_path)
    change_tensors(tmp_path, model__other__weight=torch.zeros(3, 4))
    with pytest.raises(ModelError, match=r"unexpected tensors: model\.other\.weight$"):
        load(tmp_path)


def test_experts_may_share_two_tensors(tmp_path: Path, save_qwen3_5_moe: Any, paged_contexts: Any) -> None:
    save_qwen3_5_moe()
    wanted = paged_contexts(load(tmp_path), 1, 16).step({0: [3, 5, 7]})[0]
    tensors = load_file(tmp_path / "model.safetensors")
    changes: dict[str, torch.Tensor | None] = {}
    for layer in range(4):
        place = f"model.layers.{layer}.mlp.experts"
        names = [[f"{place}.{expert}.{name}_proj.weight" for expert in range(8)] for name in ("gate", "up", "down")]
        gate, up, down = (torch.stack([tensors[name] for name in own]) for own in names)
        changes |= {name: None for own in names for name in own}
        changes |= {f"{place}.gate_up_proj": torch.cat((gate, up), 1), f"{place}.down_proj": down}
    change_tensors(tmp_path, **changes)
    assert torch.equal(paged_contexts(load(tmp_path), 1, 16).step({0: [3, 5, 7]})[0], wanted)


class RecordsNoStates(ReferenceKernels):
    def compile(self, forward: Forward) -> Forward:
        raise AssertionError


def test_states_are_computed_one_by_one_where_they_cannot_be_recorded(
    tmp_path: Path, save_granite_hybrid: Any, save_llama: Any
) -> None:
    save_granite_hybrid()
    load_model(tmp_path, torch.float32, RecordsNoStates(), CPU)
    save_llama()
    with pytest.raises(AssertionError):
        load_model(tmp_path, torch.float32, RecordsNoStates(), CPU)


def test_many_missing_tensors_are_counted(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"missing tensors: model\.layers\.3\.\S+.* and 4 more$"):
        load(tmp_path)


def test_tensors_that_follow_from_others_may_be_there(tmp_path: Path, save_llama: Any) -> None:
    reference = save_llama(tie_word_embeddings=True)
    head = reference.lm_head.weight.detach()
    change_tensors(tmp_path, lm_head__weight=head, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4))
    assert load(tmp_path).config.tie_word_embeddings


def test_the_head_may_be_the_matrix_that_is_there(tmp_path: Path, save_llama: Any, paged_contexts: Any) -> None:
    save_llama(tie_word_embeddings=True)
    expected = paged_contexts(load(tmp_path), 1, 9).step({0: [*range(3, 12)]})[0]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(paged_contexts(load(tmp_path), 1, 9).step({0: [*range(3, 12)]})[0], expected)


def test_layers_that_predict_several_tokens_may_be_there(tmp_path: Path, save_deepseek_v3: Any) -> None:
    save_deepseek_v3(num_mtp_layers=1)
    change_tensors(tmp_path, model__layers__3__eh_proj__weight=torch.zeros(4))
    assert load(tmp_path).config.num_layers == 3
    change_tensors(tmp_path, model__layers__4__eh_proj__weight=torch.zeros(4))
    with pytest.raises(ModelError, match=r"unexpected tensors: model\.layers\.4\.eh_proj\.weight$"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["self_attn__kv_b_proj__weight", "self_attn__q_b_proj__weight", "mlp__gate__weight"])
def test_what_a_deepseek_layer_lacks_is_named(tmp_path: Path, save_deepseek_v3: Any, name: str) -> None:
    save_deepseek_v3()
    change_tensors(tmp_path, **{f"model__layers__1__{name}": None})
    with pytest.raises(ModelError, match=f"missing tensors: model.layers.1.{name.replace('__', '.')}$"):
        load(tmp_path)


def test_a_quantised_tensor_is_refused(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    change_tensors(tmp_path, model__norm__weight=torch.zeros(48, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has dtype torch\.int8"):
        load(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path, save_llama: Any) -> None:
    save_llama(max_shard_size="60KB")
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(ModelError, match=f"lacks {shard.name}"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "weights.bin"])
def test_an_index_names_files_of_its_own_folder_alone(tmp_path: Path, save_llama: Any, name: str) -> None:
    save_llama()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ModelError, match="must name safetensors files of its own folder"):
        load(tmp_path)


def test_pickles_are_never_opened(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(ModelError, match=r"pickle format \(\.bin\).*use the model's safetensors"):
        load(tmp_path)


def test_a_folder_without_weights_says_so(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(tmp_path)


def test_matrices_of_the_right_dtype_stay_memory_mapped(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"matrix": torch.ones(1 << 10, 1 << 10), "vector": torch.ones(1 << 20)}, file)

    def mapped_at(tensor: Tensor) -> str:
        for line in Path("/proc/self/maps").read_text().splitlines():
            first, last = (int(end, 16) for end in line.split(" ", 1)[0].split("-"))
            if first <= tensor.data_ptr() < last:
                return line
        return ""

    def checkpoint(dtype: torch.dtype) -> Checkpoint:
        return Checkpoint([file], dtype, CPU, Packer(ReferenceKernels(), CPU))

    kept = checkpoint(torch.float32).take_packed("matrix", 1 << 10, 1 << 10).data
    copied = checkpoint(torch.float32).take("vector", 1 << 20)
    cast = checkpoint(torch.bfloat16).take("matrix", 1 << 10, 1 << 10)
    assert str(file) in mapped_at(kept)
    assert str(file) not in mapped_at(cast)
    assert str(file) not in mapped_at(copied)
    assert cast.dtype == torch.bfloat16


def test_matrices_are_announced_where_the_file_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"matrix": torch.ones(1 << 10, 1 << 10)}, file)
    announced: list[Tensor] = []
    monkeypatch.setattr(checkpoint_module, "will_read", announced.append)
    checkpoint = Checkpoint([file], torch.bfloat16, CPU, Packer(ReferenceKernels(), CPU))
    checkpoint.take_packed("matrix", 1 << 10, 1 << 10, order=range(1023, -1, -1))
    assert [(each.dtype, each.shape) for each in announced] == [(torch.float32, (1 << 10, 1 << 10))]
