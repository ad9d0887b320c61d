"""The converter of GGUF files of Llama, Qwen 2 and 3, Qwen 3 with experts, and Gemma 3.

What distinguishes their files from their Hugging Face folders is in this file: names of tensors, the order of rows,
norms that llama.cpp stores as their factor, and the fields of config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gguf import ReaderTensor

from paceline.core.errors import ModelError
from paceline.models.gguf.convert_rope import ROPE_FACTORS, rope_scaling
from paceline.models.gguf.convert_weights import TensorSource
from paceline.models.gguf.metadata import Metadata

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Family:
    """What the files of one architecture have besides Llama's tensors and config."""

    model: str
    model_type: str
    names: Mapping[str, str]
    """Names of a layer's tensors in GGUF and in safetensors that differ from _NAMES or are missing there; "" for
    tensors that the family lacks.
    """
    interleaves: bool = False
    """Whether the file interleaves the two halves of the rotary embedding in each head of queries and keys."""
    norm_offset: float = 0.0
    """Number that the converter adds to the file's weights of norms."""


_NAMES: Mapping[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_HEAD_NORMS: Mapping[str, str] = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_BIASES: Mapping[str, str] = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
_EXPERTS: Mapping[str, str] = {
    "ffn_gate.weight": "",
    "ffn_up.weight": "",
    "ffn_down.weight": "",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.{}.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.{}.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.{}.down_proj.weight",
}
_GEMMA3_NORMS: Mapping[str, str] = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", "llama", {}, interleaves=True),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2", _BIASES),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3", _HEAD_NORMS),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", "qwen3_moe", {**_HEAD_NORMS, **_EXPERTS}),
    # Gemma multiplies by one more than the number in its checkpoint, and llama.cpp by the number in its file.
    "gemma3": _Family("Gemma3ForCausalLM", "gemma3_text", {**_HEAD_NORMS, **_GEMMA3_NORMS}, norm_offset=-1.0),
}
ARCHITECTURES = tuple(_FAMILIES)
"""Names of the architectures in GGUF files."""

_SLIDING_PATTERN = 6
"""In a Gemma 3, one layer in this many attends to all tokens."""


def dense_config(metadata: Metadata, tensors: Mapping[str, ReaderTensor]) -> Config:
    """Return the fields of config.json. `check_sizes` must be called first.

    Raises:
        ModelError: the file scales its rotary embedding in a way that config.json cannot say.
    """
    own, place = _FAMILIES[metadata.architecture], metadata.architecture

    def whole(name: str, default: int | None = None) -> int:
        return metadata.whole(f"{place}.{name}", default=default)

    heads, hidden = whole("attention.head_count"), whole("embedding_length")
    head_dim = whole("rope.dimension_count" if place == "llama" else "attention.key_length", hidden // heads)
    theta = metadata.real(f"{place}.rope.freq_base", 1, 10_000.0)
    scaling = rope_scaling(metadata, tensors.get(ROPE_FACTORS), theta, head_dim)
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKEN_IDS.items()}
    return {
        "architectures": [own.model],
        "model_type": own.model_type,
        "dtype": "bfloat16",
        "vocab_size": whole("vocab_size", metadata["tokenizer.ggml.tokens"].length),
        "hidden_size": hidden,
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": whole("context_length"),
        "rms_norm_eps": metadata.real(f"{place}.attention.layer_norm_rms_epsilon", 0),
        "rope_parameters": {**scaling, "rope_theta": theta},
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        **{name: token_id for name, token_id in ids.items() if token_id is not None},
        **_further_fields(metadata, {**scaling, "rope_theta": theta}),
    }


_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _further_fields(metadata: Metadata, full: Config) -> Config:
    """Return fields of config.json that only some architectures have, or whose values differ from Llama's.

    Args:
        full: the rotary embedding of layers that attend to all tokens.
    """
    place = metadata.architecture
    if place == "gemma3":
        layers = range(1, metadata.whole("gemma3.block_count") + 1)
        sliding = {"rope_type": "default", "rope_theta": 10_000.0}
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": metadata.whole("gemma3.attention.sliding_window"),
            "layer_types": ["sliding_attention" if n % _SLIDING_PATTERN else "full_attention" for n in layers],
            "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        }
    if place == "qwen3moe":
        return {
            "hidden_act": "silu",
            "num_experts": metadata.whole("qwen3moe.expert_count"),
            "num_experts_per_tok": metadata.whole("qwen3moe.expert_used_count"),
            "moe_intermediate_size": metadata.whole("qwen3moe.expert_feed_forward_length"),
            # llama.cpp always does so.
            "norm_topk_prob": True,
        }
    return {"hidden_act": "silu"}


def dense_sources(metadata: Metadata, config: Config, tensors: Mapping[str, ReaderTensor]) -> dict[str, TensorSource]:
    """Return, for each tensor of the safetensors by name, its place in the GGUF file.

    Raises:
        ModelError: a tensor is missing, would be lost, or has another shape than the metadata say.
    """
    own = _FAMILIES[metadata.architecture]
    if config["num_hidden_layers"] > len(tensors):
        raise ModelError(f"it has {len(tensors)} tensors for {config['num_hidden_layers']} layers")
    wanted = dict(_wanted(own, config))
    present = {name: shape for name, shape in metadata.tensors.items() if name != ROPE_FACTORS}
    check_tensors(present, {name: shape for name, (_, shape) in wanted.items()})
    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    sources = {}
    for name, (theirs, shape) in wanted.items():
        interleaved = heads.get(name.split(".", 2)[-1], 0) if own.interleaves else 0
        offset = own.norm_offset if name.endswith("norm.weight") else 0.0
        parts = (tensors[name],)
        if "{}" in theirs:
            for expert in range(shape[0]):
                sources[theirs.format(expert)] = TensorSource(parts, expert)
        else:
            sources[theirs] = TensorSource(parts, None, interleaved, offset)
    return sources


def _wanted(own: _Family, config: Config) -> Iterator[tuple[str, tuple[str, list[int]]]]:
    """Yield each tensor of the file: its name, its name in safetensors, its shape."""
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    yield "token_embd.weight", ("model.embed_tokens.weight", [vocabulary, hidden])
    yield "output_norm.weight", ("model.norm.weight", [hidden])
    if not config["tie_word_embeddings"]:
        yield "output.weight", ("lm_head.weight", [vocabulary, hidden])
    names, shapes = {**_NAMES, **own.names}, _shapes(config)
    for layer in range(config["num_hidden_layers"]):
        for name, theirs in names.items():
            if theirs:
                yield f"blk.{layer}.{name}", (f"model.layers.{layer}.{theirs}", shapes.get(name, [hidden]))


def _shapes(config: Config) -> dict[str, list[int]]:
    """Return the shapes of a layer's tensors, except for norms of the whole hidden state."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    experts, expert_inner = config.get("num_experts", 0), config.get("moe_intermediate_size", 0)
    return {
        "attn_q.weight": [queries, hidden],
        "attn_k.weight": [keys, hidden],
        "attn_v.weight": [keys, hidden],
        "attn_q.bias": [queries],
        "attn_k.bias": [keys],
        "attn_v.bias": [keys],
        "attn_output.weight": [hidden, queries],
        "attn_q_norm.weight": [head_dim],
        "attn_k_norm.weight": [head_dim],
        "ffn_gate.weight": [inner, hidden],
        "ffn_up.weight": [inner, hidden],
        "ffn_down.weight": [hidden, inner],
        "ffn_gate_inp.weight": [experts, hidden],
        "ffn_gate_exps.weight": [experts, expert_inner, hidden],
        "ffn_up_exps.weight": [experts, expert_inner, hidden],
        "ffn_down_exps.weight": [experts, hidden, expert_inner],
    }


def check_tensors(present: Mapping[str, list[int]], wanted: Mapping[str, list[int]]) -> None:
    """Raise ModelError if a file lacks a tensor, has another one, or has one of another shape."""
    if missing := sorted(wanted.keys() - present.keys()):
        raise ModelError(f"it has no tensor {missing[0]}{_and_others(missing)}")
    if lost := sorted(present.keys() - wanted.keys()):
        raise ModelError(f"its tensor {lost[0]}{_and_others(lost)} would be lost")
    for name, shape in present.items():
        if shape != wanted[name]:
            raise ModelError(f"its tensor {name} has the shape {shape}, but its metadata say {wanted[name]}")


def _and_others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
