"""The scaling of a rotary embedding in a GGUF file is that of the same model's config.json, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from paceline.core.errors import ModelError
from paceline.kernels import select_kernels
from paceline.models.config import read_config
from paceline.models.gguf import convert
from paceline.models.gguf.convert import convert_gguf
from paceline.models.loader import load_model
from tests.models.gguf.test_gguf_metadata import refusal
from tests.models.gguf_files import write_gguf
from tests.models.test_model_logits import check_against_reference

CPU = torch.device("cpu")
STRING, REAL, WHOLE = gguf.GGUFValueType.STRING, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.UINT32
YARN = {"type": ("yarn", STRING), "factor": (4.0, REAL), "original_context_length": (64, WHOLE)}


def keys(place: str, values: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {f"{place}__rope__scaling__{name}": value for name, value in values.items()}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("scaling", "values"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"type": ("linear", STRING), "factor": (4.0, REAL)}),
        ({"rope_type": "linear", "factor": 4.0}, {"factor": (4.0, REAL)}),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, YARN),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0,
             "beta_slow": 2.0, "attention_factor": 0.5 * 1.1386294361119891},
            {**YARN, "yarn_beta_fast": (8.0, REAL), "yarn_beta_slow": (2.0, REAL), "attn_factor": (0.5, REAL)},
        ),
        ({"rope_type": "default"}, {"type": ("none", STRING), "factor": (4.0, REAL)}),
        ({"rope_type": "default"}, {"type": ("linear", STRING)}),
    ],
    ids=["linear", "without a type", "yarn", "yarn with all", "none", "without a factor"],
)  # fmt: skip
def test_the_scaled_model_is_that_of_transformers(
    tmp_path: Path, request: Any, paged_contexts: Any, family: str, scaling: dict[str, Any], values: dict[str, Any]
) -> None:
    save = request.getfixturevalue(f"save_{family}")
    sizes: dict[str, Any] = {"vocab_size": 261, "max_position_embeddings": 256, "num_key_value_heads": 2}
    if family == "qwen3":
        sizes |= {"head_dim": 128, "use_sliding_window": False}
    reference = save(rope_parameters={"rope_theta": 10_000.0, **scaling}, **sizes)
    for weight in reference.parameters():  # as the conversion rounds them
        weight.data.copy_(weight.bfloat16())
    split = "smollm" if family == "llama" else "qwen2"
    source = write_gguf(tmp_path / "tiny.gguf", reference, family, split, **keys(family, values))
    (tmp_path / "out").mkdir()
    convert_gguf(source, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert found == {"rope_theta": 10_000.0, **scaling}
    model = load_model(tmp_path / "out", torch.float32, select_kernels(CPU), CPU)
    check_against_reference(reference, model, paged_contexts)


def test_only_full_layers_of_a_gemma_3_are_scaled(
    tmp_path: Path, save_gemma3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = save_gemma3(vocab_size=261, head_dim=256, query_pre_attn_scalar=256, num_hidden_layers=7)
    values = keys("gemma3", {"type": ("linear", STRING), "factor": (8.0, REAL)})
    source = write_gguf(tmp_path / "tiny.gguf", reference, "gemma3", **values)
    monkeypatch.setattr(convert, "_write_tokenizer", lambda *_: None)  # no Gemma has a byte-level vocabulary
    convert_gguf(source, tmp_path / "out")
    attention = read_config(tmp_path / "out").attention
    ropes = {kind: each.rope for kind, each in attention.items()}
    assert {kind: rope and (rope.kind, rope.factor) for kind, rope in ropes.items()} == {
        "full": ("linear", 8.0), "sliding": ("default", 1.0)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": ("longrope", STRING)}, "its type is 'longrope', and only none, linear and yarn are converted"),
        ({**YARN, "alpha": (2.0, REAL)}, r"its llama\.rope\.scaling\.alpha is not converted"),
        ({**YARN, "yarn_ext_factor": (0.5, REAL)}, r"its llama\.rope\.scaling\.yarn_ext_factor is not 1"),
        ({**YARN, "yarn_log_multiplier": (0.1, REAL)}, r"its llama\.rope\.scaling\.yarn_log_multiplier is not 0"),
        ({"attn_factor": (2.0, REAL)}, r"its llama\.rope\.scaling\.attn_factor is not converted"),
    ],
)
def test_other_scalings_are_refused_by_name(
    tmp_path: Path, save_llama: Any, values: dict[str, Any], message: str
) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", save_llama(vocab_size=261), **keys("llama", values))
    with pytest.raises(
        ModelError, match=rf"^tiny\.gguf cannot be converted: its rope scaling would be lost: {message}"
    ):
        convert_gguf(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": (float("nan"), REAL)}, "its llama.rope.scaling.factor is nan, but must be a finite number"),
        ({"factor": (-1.0, REAL)}, "its llama.rope.scaling.factor is -1.0, but must be a finite number"),
        ({"original_context_length": (0, WHOLE)}, "its llama.rope.scaling.original_context_length is 0, but must be"),
        ({"yarn_beta_slow": (float("inf"), REAL)}, "its llama.rope.scaling.yarn_beta_slow is inf, but must be"),
    ],
)
def test_impossible_parameters_are_named(
    tmp_path: Path, save_llama: Any, changes: dict[str, Any], message: str
) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", save_llama(vocab_size=261), **keys("llama", {**YARN, **changes}))
    assert refusal(source, tmp_path / "out").startswith(message)
