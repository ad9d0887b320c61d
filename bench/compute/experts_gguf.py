"""Write a checkpoint of `bench.compute.experts model` as a GGUF file in Q4_1, for llama.cpp and `paceline serve`.

    python -m bench.compute.experts_gguf FOLDER FILE.gguf
    python -m bench.serving.q4 --peer VENV --gguf FILE.gguf

Matrices are Q4_1; norms and routers are fp32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors import safe_open

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
"""Names of a layer's tensors in the checkpoint and in the file."""


class Checkpoint:
    """The tensors of a folder, in fp32."""

    def __init__(self, folder: Path) -> None:
        files: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        self._open = {name: safe_open(folder / name, "pt") for name in set(files.values())}
        self._files = files

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        return self._open[self._files[f"{name}.weight"]].get_tensor(f"{name}.weight").float().numpy()


def write(folder: Path, file: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    checkpoint = Checkpoint(folder)
    writer = GGUFWriter(file, "qwen3moe")
    _write_sizes(writer, config)
    _write_tokenizer(writer, folder, config)
    _add(writer, "token_embd.weight", checkpoint.tensor("model.embed_tokens"))
    _add(writer, "output_norm.weight", checkpoint.tensor("model.norm"))
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        for ours, theirs in NAMES.items():
            _add(writer, f"blk.{layer}.{theirs}.weight", checkpoint.tensor(f"{place}.{ours}"), "inp" not in theirs)
        for part in ("gate", "up", "down"):
            names = [f"{place}.mlp.experts.{expert}.{part}_proj" for expert in range(config["num_experts"])]
            _add(writer, f"blk.{layer}.ffn_{part}_exps.weight", np.stack([checkpoint.tensor(name) for name in names]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)


def _write_tokenizer(writer: GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Write the tokens that the model has rows for. A benchmark sends token ids, so the merges do not matter."""
    vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [f"[{index}]" for index in range(config["vocab_size"])]
    for token, index in vocabulary.items():
        if index < len(tokens):
            tokens[index] = token
    known = set(tokens)
    merges = [f"{a} {b}" for a in "abcdefgh" for b in "abcdefgh" if {a, b, a + b} <= known]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])


def _add(writer: GGUFWriter, name: str, tensor: np.ndarray[Any, Any], packs: bool = True) -> None:
    if tensor.ndim == 1 or not packs:
        writer.add_tensor(name, tensor)
        return
    packed = quantize(tensor, GGMLQuantizationType.Q4_1)
    writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q4_1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compute.experts_gguf", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a checkpoint of `bench.compute.experts model`")
    parser.add_argument("file", type=Path, help="the GGUF file to write")
    args = parser.parse_args()
    write(args.folder, args.file)


if __name__ == "__main__":
    main()
