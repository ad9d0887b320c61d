"""Models that run in their own code in `transformers`: tokens, groups, refusals, and code in checkpoints' folders."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bench.compute.tiny_architectures import save_tiny
from paceline.core.errors import ConfigError, ModelError
from paceline.kernels import select_kernels
from paceline.models.base import Model
from paceline.models.gguf.convert import convert_gguf
from paceline.models.identity import implementation_name, model_identity
from paceline.models.loader import load_model
from paceline.models.transformers_backend.attention import NAME, Mask, register
from paceline.models.transformers_backend.loading import check_config
from tests.models.gguf_files import write_gguf
from tests.models.test_model_logits import check_against_reference, random_tokens, same

CPU = torch.device("cpu")


def load(folder: Path, kernels: str = "native", dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    return load_model(folder, dtype, select_kernels(CPU, kernels), CPU, **{"model_impl": "transformers", **options})


# Windows, biases and partial rotation; learned positions, transposed matrices and a tied head; experts; keys and values
# of different sizes; parallel blocks and a scaled head; sinks.
@pytest.mark.parametrize("family", ["olmo3", "stablelm", "gpt2", "olmoe", "deepseek_v3", "cohere2", "gpt_oss"])
def test_logits_are_those_of_transformers(tmp_path: Path, paged_contexts: Any, family: str) -> None:
    check_against_reference(save_tiny(family, tmp_path), load(tmp_path), paged_contexts, tolerance=1e-4)


def test_other_kernels_give_the_same_logits(tmp_path: Path, paged_contexts: Any) -> None:
    check_against_reference(save_tiny("gpt2", tmp_path), load(tmp_path, "reference"), paged_contexts, tolerance=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_family_with_a_file_gives_the_same_logits_both_ways(
    tmp_path: Path, request: pytest.FixtureRequest, paged_contexts: Any, family: str
) -> None:
    request.getfixturevalue(f"save_{family}")()
    (tokens,) = random_tokens(100, 70)
    native, own = (load(tmp_path, model_impl=code) for code in ("native", "transformers"))
    assert type(native) is not type(own)
    logits = [paged_contexts(model, 1, 70).step({0: tokens})[0] for model in (native, own)]
    same(logits[1], logits[0], tolerance=1e-4)


def test_auto_prefers_a_file_here(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    assert type(load(tmp_path, model_impl="auto")) is type(load(tmp_path, model_impl="native"))
    save_tiny("olmo2", tmp_path / "other")
    assert load(tmp_path / "other", model_impl="auto").config.architecture == "Olmo2ForCausalLM"
    with pytest.raises(ModelError, match="architecture Olmo2ForCausalLM is not supported"):
        load(tmp_path / "other", model_impl="native")


def test_layers_are_grouped_by_their_windows_and_shapes(tmp_path: Path) -> None:
    save_tiny("olmo3", tmp_path)
    model = load(tmp_path)
    assert [(shape.layers, shape.window, shape.kv_heads, shape.head_dim) for shape in model.group_shapes] == [
        ((0, 1, 2), 20, 2, 16),
        ((3,), 0, 2, 16),
    ]
    assert model.layer_groups == (0, 0, 0, 1)


def test_bf16_logits_are_fp32_and_close(tmp_path: Path, paged_contexts: Any) -> None:
    reference = save_tiny("olmo2", tmp_path, torch.bfloat16)
    model = load(tmp_path, dtype=torch.bfloat16)
    (tokens,) = random_tokens(101, 40)
    found = paged_contexts(model, 1, 40, torch.bfloat16).step({0: tokens})[0]
    with torch.inference_mode():
        wanted = reference.float()(torch.tensor([tokens])).logits[0]
    assert found.dtype == torch.float32
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


REFUSED = {
    "mamba2": r"layer 0 \(Mamba2Mixer\) does not call the attention interface",
    "jamba": r"layer 0 \(JambaMambaMixer\) does not call the attention interface",
    "bloom": r"layer 0 \(BloomAttention\) does not call the attention interface",
    "falcon_h1": "layers keep states besides keys and values",
    "llama4_text": "mask is not causal with at most a sliding window",
    "bert": "mask is not causal with at most a sliding window",
    "bart": r"BartDecoder takes no positions \(position_ids\)",
    "t5": "T5Model has an encoder",
}


@pytest.mark.parametrize(
    ("architecture", "kind", "complaint"),
    [
        ("GPT9ForCausalLM", "gpt9", "transformers cannot load"),
        ("Mamba2ForCausalLM", "mamba2", "Mamba2ForCausalLM keeps states besides keys and values"),
        ("BertForMaskedLM", "vit", "BertForMaskedLM is no causal language model"),
    ],
)
def test_a_model_without_a_decoder_is_refused_by_its_config(
    tmp_path: Path, architecture: str, kind: str, complaint: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": kind}))
    with pytest.raises(ModelError, match=complaint):
        check_config(tmp_path, trust_remote_code=False)


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_our_attention_cannot_run_is_refused_by_name(tmp_path: Path, family: str) -> None:
    save_tiny(family, tmp_path)
    with pytest.raises(ModelError, match=REFUSED[family]):
        load(tmp_path)


def test_an_argument_of_attention_that_is_unknown_is_refused() -> None:
    register()
    attention: Any = transformers.AttentionInterface()[NAME]
    heads, mask = torch.zeros(1, 2, 3, 8), Mask(lambda batch, head, query, key: key <= query)
    with pytest.raises(ModelError, match=r"its attention \(Identity\) depends on position_bias"):
        attention(torch.nn.Identity(), heads, heads, heads, mask, position_bias=heads, output_attentions=False)
    with pytest.raises(ModelError, match="has a mask that transformers did not make"):
        attention(torch.nn.Identity(), heads, heads, heads, None)


def test_a_rope_that_changes_with_the_context_limits_the_context(tmp_path: Path, paged_contexts: Any) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    reference = save_tiny("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=96)
    model = load(tmp_path)
    assert model.config.max_position == 96
    check_against_reference(reference, model, paged_contexts, tolerance=1e-4)


CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM

(pathlib.Path(__file__).parent / "has-run").touch()


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        if config.looks_back:
            for layer in self.model.layers:
                layer.mlp.register_forward_pre_hook(lambda module, args: (args[0].cumsum(dim=1),))
"""


@pytest.fixture
def save_own_code(tmp_path: Path, save_llama: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Any]:
    """Save a Llama whose class is defined by code in its folder. Its layers may add up all tokens before."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def save(looks_back: bool) -> Any:
        reference = save_llama()
        config = json.loads((tmp_path / "config.json").read_text())
        config |= {"model_type": "own", "architectures": ["OwnModel"], "looks_back": looks_back}
        config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "modeling_own.py").write_text(CODE)
        return reference

    return save


def has_run(folder: Path) -> bool:
    return any(folder.rglob("has-run"))


def test_code_of_a_folder_runs_only_on_request(
    tmp_path: Path, save_own_code: Callable[[bool], Any], paged_contexts: Any
) -> None:
    reference = save_own_code(False)
    with pytest.raises(ModelError, match="does not run unless --trust-remote-code is given"):
        load(tmp_path, model_impl="auto")
    assert not has_run(tmp_path)
    check_against_reference(reference, load(tmp_path, trust_remote_code=True), paged_contexts)
    assert has_run(tmp_path)


def test_layers_that_look_at_other_tokens_are_found_by_the_results(
    tmp_path: Path, save_own_code: Callable[[bool], Any]
) -> None:
    save_own_code(True)
    with pytest.raises(ModelError, match="tokens depend on something else than keys and values"):
        load(tmp_path, trust_remote_code=True)


def test_missing_tensors_and_packages_are_named(
    tmp_path: Path, save_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"missing tensors: model\.layers\.3\.input_layernorm\.weight"):
        load(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[convert\]'"):
        load(tmp_path)


def test_tensors_of_another_shape_are_named(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"tensors of another shape: model\.norm\.weight is \[3\] instead of \[48\]"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantized_tensors_are_refused_without_a_word_in_the_config(
    tmp_path: Path, save_llama: Any, dtype: torch.dtype
) -> None:
    save_llama()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, "unused": torch.ones(2, dtype=torch.uint8)}, file, {"format": "pt"})
    load(tmp_path)
    save_file({**tensors, name: (100 * tensors[name]).to(dtype)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name} has dtype .*; quantized checkpoints are not supported"):
        load(tmp_path)


def test_masks_of_old_checkpoints_are_no_quantized_tensors(tmp_path: Path) -> None:
    save_tiny("gpt_neox", tmp_path)
    file = tmp_path / "model.safetensors"
    mask = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8).tril()}
    save_file({**load_file(file), **mask}, file, {"format": "pt"})
    assert load(tmp_path).config.architecture == "GPTNeoXForCausalLM"


def test_tensors_that_are_not_used_are_counted(
    tmp_path: Path, save_llama: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save_llama()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    load(tmp_path)
    assert "does not use 9 of the tensors, such as model.layers.2." in caplog.text


def test_weights_that_are_not_finite_are_found_by_the_results(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="its own code computes NaN or infinity"):
        load(tmp_path)


def test_workers_share_packed_weights(tmp_path: Path, paged_contexts: Any) -> None:
    save_tiny("gpt2", tmp_path / "model")
    (tokens,) = random_tokens(101, 20)
    first, second = (load(tmp_path / "model", packed_dir=tmp_path / "packed") for _ in range(2))
    assert len(list((tmp_path / "packed").glob("*.shards"))) == 1
    logits = [paged_contexts(model, 1, 20).step({0: tokens})[0] for model in (first, second, load(tmp_path / "model"))]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_int8_rounds_matrices_and_gguf_is_refused(tmp_path: Path, paged_contexts: Any) -> None:
    save_tiny("olmo2", tmp_path)
    (tokens,) = random_tokens(101, 20)
    plain, rounded = (load(tmp_path, quantization=how) for how in ("none", "int8"))
    one, other = (paged_contexts(model, 1, 20).step({0: tokens})[0] for model in (plain, rounded))
    assert not torch.equal(one, other)
    same(other, one, tolerance=0.2)
    with pytest.raises(ConfigError, match="gguf needs a native model"):
        load(tmp_path, quantization="gguf")


def test_matrices_in_a_gguf_file_are_computed_too(tmp_path: Path, save_llama: Any, paged_contexts: Any) -> None:
    reference = save_llama(vocab_size=261, num_key_value_heads=2)
    for weight in reference.parameters():  # as the file's numbers are rounded
        weight.data.copy_(weight.bfloat16())
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", reference), tmp_path / "out")
    check_against_reference(reference, load(tmp_path / "out"), paged_contexts, tolerance=1e-4)


def test_both_codes_are_different_models(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    names = [implementation_name(tmp_path, code) for code in ("auto", "native", "transformers")]
    assert names == ["native", "native", f"transformers {transformers.__version__}"]
    native, own = (model_identity(tmp_path, "bfloat16", code=name) for name in names[1:])
    assert native != own
    (tmp_path / "modeling.py").write_text("x = 1")
    assert model_identity(tmp_path, "bfloat16", code=names[2]) != own


@given(window=st.integers(1, 100), max_position=st.integers(2, 120))
def test_windows_are_read_from_masks(window: int, max_position: int) -> None:
    mask = Mask(lambda batch, head, query, key: (key <= query) & (key > query - window))
    assert mask.window(max_position) == (window if window < max_position else 0)


@pytest.mark.parametrize(
    "allows",
    [
        lambda batch, head, query, key: key >= 0,
        lambda batch, head, query, key: (key <= query) & (key // 32 == query // 32),
        lambda batch, head, query, key: (key <= query) | (key < 4),
        lambda batch, head, query, key: (key <= query) & ((key > query - 8) | (key < 2)),
    ],
    ids=["bidirectional", "chunked", "prefix", "first tokens"],
)
def test_other_masks_are_refused(allows: Any) -> None:
    with pytest.raises(ModelError, match="not causal with at most a sliding window"):
        Mask(allows).window(128)
