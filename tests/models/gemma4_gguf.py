"""GGUF files of tiny Gemma 4 models, with the names of llama.cpp's converter."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
VISIBLE = ["<|tool_response>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS = [*CONTROL, *VISIBLE, *BYTES, "▁", *string.ascii_letters, "he", "▁he"]
SIZES: dict[str, object] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "global_head_dim": 32,
}
"""Sizes with rows of whole blocks."""
KIND_SIZES: dict[str, dict[str, object]] = {
    "gemma4": {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": len(TOKENS)},
    "gemma4_dense": {},
    "gemma4_experts": {"moe_intermediate_size": 32},
}


def write_gemma4_gguf(
    path: Path,
    reference: transformers.PreTrainedModel,
    quantized: gguf.GGMLQuantizationType | None = None,
    halves: bool = False,
    **more: Any,
) -> Path:
    """Write a GGUF file of a tiny Gemma 4 with SIZES.

    Args:
        quantized: type of the matrices; None does not quantize them.
        halves: whether gate and up of experts are two tensors.
        more: metadata below `gemma4.`, as (value, type), with "__" for dots.
    """
    path.parent.mkdir(exist_ok=True)  # transformers also reads other files beside it
    writer = gguf.GGUFWriter(path, "gemma4")
    _add_tokenizer(writer)
    _add_sizes(writer, reference)
    for name, value in more.items():
        writer.add_key_value(f"gemma4.{name.replace('__', '.')}", *value)
    for name, weight in _tensors(reference, halves).items():
        if quantized is not None and weight.dim() >= 2 and "ffn_gate_inp" not in name:
            data = gguf.quants.quantize(weight.contiguous().numpy(), quantized)
            writer.add_tensor(name, data, raw_dtype=quantized)
        else:
            writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    rest = len(TOKENS) - len(CONTROL) - len(VISIBLE) - len(BYTES)
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types([3] * len(CONTROL) + [4] * len(VISIBLE) + [6] * len(BYTES) + [1] * rest)
    writer.add_token_merges(["h e", "▁ he"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ bos_token }}{{ messages[0]['content'] }}")


def _add_sizes(writer: gguf.GGUFWriter, reference: transformers.PreTrainedModel) -> None:
    config, state = reference.config, reference.state_dict()
    sliding = [own == "sliding_attention" for own in config.layer_types]
    places = [f"model.layers.{layer}" for layer in range(config.num_hidden_layers)]
    kv_rows = {own: len(state[f"{places[sliding.index(own)]}.self_attn.k_proj.weight"]) for own in (True, False)}
    head_dims = {True: SIZES["head_dim"], False: SIZES["global_head_dim"]}
    ropes = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length([len(state[f"{place}.mlp.gate_proj.weight"]) for place in places])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([kv_rows[own] // head_dims[own] for own in sliding])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dims[False])
    writer.add_value_length(head_dims[False])
    writer.add_key_length_swa(head_dims[True])
    writer.add_value_length_swa(head_dims[True])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(head_dims[False])
    writer.add_rope_dimension_count_swa(head_dims[True])
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _tensors(reference: transformers.PreTrainedModel, halves: bool) -> dict[str, torch.Tensor]:
    """Return the tensors in fp32, by the names that llama.cpp's converter gives them."""
    config = reference.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_hidden_layers)
    pairs = int(config.rope_parameters["full_attention"]["partial_rotary_factor"] * SIZES["global_head_dim"]) // 2
    tensors = {"rope_freqs.weight": torch.tensor([1.0] * pairs + [1e30] * (SIZES["global_head_dim"] // 2 - pairs))}
    for own, weight in reference.state_dict().items():
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = own if own.endswith((".weight", ".scale", "_scale")) else f"{own}.weight"
        if name.endswith("router.scale"):
            name = f"blk.{name.split('.')[2]}.ffn_gate_inp.scale"
        elif name.endswith("router.per_expert_scale"):
            name = f"blk.{name.split('.')[2]}.ffn_down_exps.scale"
        else:
            name = names.get_name(name, try_suffixes=(".weight",))
        if halves and "gate_up" in name:
            gate, up = weight.float().chunk(2, dim=1)
            tensors |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            tensors[name] = weight.float()
    return tensors
