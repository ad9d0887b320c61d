from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file


def write_model(folder: Path) -> Path:
    """Write the files that are read before a worker loads a model: the config, and 1 MiB of bfloat16 weights."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.zeros(512, 1024, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny-llama")
