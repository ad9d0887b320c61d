"""A random Gemma 4 that reads images, videos and audio, with a small tokenizer and a chat template.

Its vision tower has the shape of E2B's. Its text model is of the same family, and has about 100 million parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.services.gateway.toy_model import write_toy_media_model

DTYPE = torch.bfloat16
VOCAB = 4096
VISION: Mapping[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "intermediate_size": 3072,
    "use_clipped_linears": True,
    "standardize": False,
}
"""The vision tower of E2B."""
SMALL_VISION: Mapping[str, Any] = {**VISION, "num_hidden_layers": 2, "intermediate_size": 768}
SMALL_AUDIO: Mapping[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "subsampling_conv_channels": [128, 32],
    "output_proj_dims": 128,
}
TEXT: Mapping[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 3,
    "intermediate_size": 3072,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "global_head_dim": 256,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": 512,
    "max_position_embeddings": 8192,
    "vocab_size": VOCAB,
}


def write_media_model(
    folder: Path,
    vision: Mapping[str, Any] = VISION,
    audio: Mapping[str, Any] | None = None,
    text: Mapping[str, Any] = TEXT,
) -> Any:
    """Save a random model in bf16 to a new folder, and return the model of `transformers`.

    Args:
        vision, audio, text: fields of the configs of its parts. Without `audio` the model hears nothing.
    """
    write_toy_media_model(folder)
    ids = {name: value for name, value in json.loads((folder / "config.json").read_text()).items() if "token" in name}
    config = transformers.Gemma4Config(
        text_config={**text, "bos_token_id": None, "eos_token_id": 256},
        vision_config=dict(vision),
        audio_config=None if audio is None else dict(audio),
        **ids,
    )
    torch.manual_seed(0)
    model = transformers.Gemma4ForConditionalGeneration(config).to(DTYPE).eval()
    model.save_pretrained(folder)
    return model
