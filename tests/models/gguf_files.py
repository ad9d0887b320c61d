"""GGUF files of tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from tokenizers import pre_tokenizers
from torch import Tensor

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Return the rows in llama.cpp's order, with the two halves of the rotary embedding interleaved."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(
    path: Path,
    reference: transformers.PreTrainedModel | None = None,
    architecture: str = "llama",
    split: str = "smollm",
    quantized: gguf.GGMLQuantizationType | None = None,
    whole: str = "",
    bos: bool | None = False,
    without: str = "",
    beside: str = "",
    divisors: Sequence[float] = (),
    most_tensors: int = 0,
    **more: Any,
) -> Path:
    """Write a GGUF file of a tiny Llama, or Qwen, with a byte-level vocabulary. Without a reference it has no weights.

    Args:
        quantized: type of the matrices; None does not quantize them.
        whole: a token that no merge makes.
        bos: whether prompts begin with BOS; with None, the file does not say.
        without: name of a tensor that the file does not have.
        beside: name of a tensor that the file has in addition.
        divisors: numbers by which the frequencies of pairs of dimensions are divided; empty if the file has none.
        most_tensors: largest number of tensors in a part, if the file is split; the result is its first part.
        more: further or other metadata as (value, type), with __ instead of dots; None removes a key.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=most_tensors)
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "ĠĠ", *([whole] if whole else [])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ċ Ċ", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    if bos is not None:
        writer.add_add_bos_token(bos)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    if reference is not None:
        _add_weights(writer, reference, quantized, without)
    for name, value in more.items():
        writer.kv_data[0].pop(name.replace("__", "."), None)
        if value is not None:
            writer.add_key_value(name.replace("__", "."), *value)
    if beside:
        writer.add_tensor(beside, np.ones(4, dtype=np.float32))
    if divisors:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))), path) if most_tensors else path


def _add_weights(
    writer: gguf.GGUFWriter,
    reference: transformers.PreTrainedModel,
    quantized: gguf.GGMLQuantizationType | None,
    without: str,
) -> None:
    def add(name: str, weight: Tensor) -> None:
        if name == without:
            return
        data = weight.contiguous().numpy()
        if quantized is not None and data.ndim >= 2 and "gate_inp" not in name:
            writer.add_tensor(name, gguf.quants.quantize(data, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, data)

    config = reference.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_rope_dimension_count(head_dim)
    if config.model_type in ("qwen3", "qwen3_moe", "gemma3_text"):
        writer.add_key_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    state = reference.state_dict()
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        names["post_attention_layernorm"] = "post_attention_norm"
        names["pre_feedforward_layernorm"] = "ffn_norm"
        names["post_feedforward_layernorm"] = "post_ffw_norm"
        state = {name: weight + 1 if name.endswith("norm.weight") else weight for name, weight in state.items()}
    if config.model_type == "qwen3_moe":
        names["mlp.gate"] = "ffn_gate_inp"
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        for layer in range(config.num_hidden_layers):
            place = f"model.layers.{layer}.mlp.experts"
            gate, up = state.pop(f"{place}.gate_up_proj").chunk(2, dim=1)
            for name, weight in (("gate", gate), ("up", up), ("down", state.pop(f"{place}.down_proj"))):
                add(f"blk.{layer}.ffn_{name}_exps.weight", weight)
    add("token_embd.weight", state["model.embed_tokens.weight"])
    add("output_norm.weight", state["model.norm.weight"])
    add("output.weight", state["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        for theirs, name in names.items():
            for part in ("weight", "bias"):
                tensor = state.get(f"model.layers.{layer}.{theirs}.{part}")
                if tensor is None:
                    continue
                if name in ("attn_q", "attn_k") and config.model_type == "llama":
                    heads = config.num_attention_heads if name == "attn_q" else config.num_key_value_heads
                    tensor = permuted(tensor, heads)
                add(f"blk.{layer}.{name}.{part}", tensor)
