"""The converter of a GGUF file of Gemma 4. Unlike the converter of transformers, it keeps the types and sizes of
layers, layers without KV, inputs for each layer, experts, and the bound of logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf import ReaderTensor

from paceline.core.errors import ModelError
from paceline.models.gguf.convert_weights import TensorSource
from paceline.models.gguf.metadata import Metadata

_NAMES: Mapping[str, str] = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "per_layer_token_embd.weight": "embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
    "layer_output_scale.weight": "layer_scalar",
}
"""Names of tensors in GGUF and in safetensors, without the number of their layer."""
_HALVES: Mapping[str, str] = {
    "ffn_gate_exps.weight": "ffn_gate_up_exps.weight",
    "ffn_up_exps.weight": "ffn_gate_up_exps.weight",
}
"""Halves of a tensor that are separate tensors in some files, with the name of the whole tensor: gate comes before
up.
"""
_FACTORS = "rope_freqs.weight"
"""Divisors of the frequencies of full layers: 1, or a number so large that the frequency becomes 0."""
_NO_ROTATION = 1e29
GEMMA4_TABLES: tuple[str, ...] = ("model.embed_tokens_per_layer.weight",)
"""Matrices whose rows are read from the safetensors, not from blocks."""


def gemma4_config(metadata: Metadata, tensors: Mapping[str, ReaderTensor]) -> Mapping[str, Any]:
    """Return the fields of config.json. Raises ModelError, which says what the file lacks."""
    return _Config(metadata, tensors).fields()


def gemma4_sources(tensors: Mapping[str, ReaderTensor]) -> dict[str, TensorSource]:
    """Return, for each tensor of the safetensors by name, its place in the GGUF file. Raises ModelError for unknown
    names.
    """
    parts: dict[str, list[ReaderTensor]] = {}
    for name, tensor in tensors.items():
        if name != _FACTORS:
            parts.setdefault(_own_name(name), []).append(tensor)
    # Gate comes before up in alphabetical order.
    return {name: TensorSource(sorted(named, key=lambda tensor: tensor.name)) for name, named in parts.items()}


def _own_name(name: str) -> str:
    place, rest = "model", name
    if name == "output.weight":
        return "lm_head.weight"
    if name.startswith("blk."):
        _, layer, rest = name.split(".", 2)
        place = f"model.layers.{layer}"
    rest = _HALVES.get(rest, rest)
    if rest not in _NAMES:
        raise ModelError(f"it has the tensor {name}, which no Gemma 4 for text has")
    return f"{place}.{_NAMES[rest]}"


class _Config:
    """The fields of config.json, from the file's metadata and the shapes of its tensors."""

    def __init__(self, metadata: Metadata, tensors: Mapping[str, ReaderTensor]) -> None:
        self._metadata = metadata
        self._tensors = tensors
        self._layers = self._whole("block_count")
        pattern = metadata.get("gemma4.attention.sliding_window_pattern")
        if not isinstance(pattern, list) or len(pattern) != self._layers:
            raise ModelError(f"its sliding_window_pattern does not name {self._layers} layers")
        self._sliding = [bool(each_type) for each_type in pattern]
        self._shared = self._whole("attention.shared_kv_layers", 0, 0)
        self._head_dims = {
            True: self._one_size("attention.key_length_swa", "attention.value_length_swa"),
            False: self._one_size("attention.key_length", "attention.value_length"),
        }

    def fields(self) -> dict[str, Any]:
        vocab_size, hidden = self._rows("token_embd.weight"), self._whole("embedding_length")
        inner = self._rows("blk.0.ffn_gate.weight")
        inputs = self._whole("embedding_length_per_layer_input", 0, 0)
        return {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "dtype": "bfloat16",
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "use_double_wide_mlp": self._rows(f"blk.{self._layers - 1}.ffn_gate.weight") == 2 * inner,
            "num_hidden_layers": self._layers,
            "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in self._sliding],
            "num_attention_heads": self._whole("attention.head_count"),
            "num_key_value_heads": self._kv_heads(True),
            "num_global_key_value_heads": self._kv_heads(False),
            "head_dim": self._head_dims[True],
            "global_head_dim": self._head_dims[False],
            "attention_k_eq_v": f"blk.{self._first(False)}.attn_v.weight" not in self._tensors,
            "num_kv_shared_layers": self._shared,
            "sliding_window": self._whole("attention.sliding_window"),
            "rope_parameters": self._ropes(),
            "max_position_embeddings": self._whole("context_length"),
            # The file has it in fp32. Rounding to seven digits restores the decimal number that was meant.
            "rms_norm_eps": float(f"{self._real('attention.layer_norm_rms_epsilon', 0):.7g}"),
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": self._real("final_logit_softcapping", 0, 0.0) or None,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "hidden_size_per_layer_input": inputs,
            "vocab_size_per_layer_input": self._rows("per_layer_token_embd.weight") if inputs else vocab_size,
            **self._experts(),
        }

    def _experts(self) -> dict[str, Any]:
        count = self._whole("expert_count", 0, 0)
        if not count:
            return {"enable_moe_block": False}
        return {
            "enable_moe_block": True,
            "num_experts": count,
            "top_k_experts": self._metadata.whole("gemma4.expert_used_count", most=count),
            "moe_intermediate_size": self._whole("expert_feed_forward_length"),
        }

    def _ropes(self) -> dict[str, Any]:
        if self._whole("rope.dimension_count_swa", default=self._head_dims[True]) != self._head_dims[True]:
            raise ModelError("its sliding layers rotate only a part of each head")
        divisors = self._tensor(_FACTORS).data
        rotated = int((divisors == 1).sum())
        if (divisors[:rotated] != 1).any() or not (divisors[rotated:] >= _NO_ROTATION).all():
            raise ModelError(f"its rope scaling ({_FACTORS}) would be lost")
        return {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": self._real("rope.freq_base_swa", 1, 10_000.0),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": self._real("rope.freq_base", 1),
                "partial_rotary_factor": 2 * rotated / self._head_dims[False],
            },
        }

    def _first(self, sliding: bool) -> int:
        """Return the first layer of a type, or the first layer if there is none of this type."""
        return self._sliding.index(sliding) if sliding in self._sliding else 0

    def _kv_heads(self, sliding: bool) -> int:
        layer = self._first(sliding)
        return self._rows(f"blk.{layer}.attn_k.weight") // self._head_dims[self._sliding[layer]]

    def _one_size(self, keys: str, values: str) -> int:
        size = self._whole(keys)
        if self._whole(values, default=size) != size:
            raise ModelError(f"its {keys} and {values} differ")
        return size

    def _whole(self, name: str, least: int = 1, default: int | None = None) -> int:
        return self._metadata.whole(f"gemma4.{name}", least, default=default)

    def _real(self, name: str, least: float, default: float | None = None) -> float:
        return self._metadata.real(f"gemma4.{name}", least, default)

    def _rows(self, name: str) -> int:
        return int(self._tensor(name).shape[-1])

    def _tensor(self, name: str) -> ReaderTensor:
        if name not in self._tensors:
            raise ModelError(f"it lacks the tensor {name}")
        return self._tensors[name]
