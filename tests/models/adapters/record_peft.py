"""Record adapters that PEFT has written, with the logits that PEFT computes with them.

    pip install peft accelerate  # in an environment with the packages of the tests
    python -m tests.models.adapters.record_peft

Each case of CASES becomes a folder in `tests/models/adapters/recorded`: the adapter's files, and `logits.safetensors`
with the logits of PROMPT. The models are those of `write_tiny`, whose weights are always the same. The adapters are not
merged, and all numbers are fp32.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.tiny_checkpoints import write_tiny

FOLDER = Path(__file__).with_name("recorded")
PROMPT = [(7 * index * index + 3) % 97 for index in range(12)]
SMALL: dict[str, object] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CASES: Mapping[str, tuple[str, dict[str, object], dict[str, Any]]] = {
    "dora": ("llama", {}, {"target_modules": ALL, "use_dora": True, "use_rslora": True}),
    "dora with biases": (
        "qwen2",
        {"num_hidden_layers": 1},
        {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_dora": True, "bias": "lora_only"},
    ),
    "biases": ("qwen2", {}, {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    "all biases": ("qwen2", {}, {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
    "head": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["lm_head", "q_proj"]}),
    "head with dora": ("llama", {}, {"target_modules": ["lm_head"], "use_dora": True}),
}
"""Each case: the family of the model, changes to its config, and settings of the adapter."""


def write_base(folder: Path, family: str, changes: Mapping[str, object]) -> Any:
    """Write the model of a case, and return it."""
    return write_tiny(folder, family, **{**SMALL, **changes})


def record(name: str) -> None:
    """Write the files of one case."""
    from peft import LoraConfig, get_peft_model

    family, changes, settings = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        base = write_base(Path(folder), family, changes)
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=6, **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for own in model.parameters():
            if own.requires_grad:
                own += 0.3 * torch.randn(own.shape, generator=generator)
        logits = model(torch.tensor([PROMPT])).logits[0]
    model.save_pretrained(str(FOLDER / name))
    (FOLDER / name / "README.md").unlink(missing_ok=True)
    save_file({"logits": logits.contiguous()}, FOLDER / name / "logits.safetensors")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        record(case)
