"""Every way of the table of architectures runs, and a wrong token is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.compute import architectures
from bench.compute.architectures import CPU, REPEATING, Outcome, Way, generate, page, try_family
from bench.compute.tiny_architectures import save_tiny
from paceline.core.errors import ConfigError
from paceline.core.speculative import SpeculativeConfig
from paceline.engine.loading import load
from paceline.kernels import select_kernels


def test_a_family_is_tried_in_all_ways() -> None:
    assert try_family("llama") == Outcome("LlamaForCausalLM", "native", "same tokens")
    assert try_family("olmo3") == Outcome("Olmo3ForCausalLM", "transformers", "same tokens")


def test_a_wrong_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: object) -> list[list[int]]:
        return [[token ^ 1 for token in tokens] for tokens in generate(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr(architectures, "generate", other)
    assert try_family("olmo2").is_wrong


def test_a_refusal_is_told_without_the_folder() -> None:
    outcome = try_family("t5")
    assert outcome == Outcome("T5Model", "transformers", "refused: has an encoder, and only decoders are supported")
    assert f"| {' | '.join(outcome[:3])} |\n" in page([outcome])


@pytest.mark.parametrize(("target", "draft"), [("olmo3", "olmo2"), ("llama", "olmo3"), ("gpt2", "llama")])
def test_models_of_both_codes_draft_for_each_other(tmp_path: Path, target: str, draft: str) -> None:
    save_tiny(target, tmp_path / "target")
    save_tiny(draft, tmp_path / "draft", num_hidden_layers=2, layer_types=None)
    speculative = SpeculativeConfig("draft_model", model=str(tmp_path / "draft"), num_speculative_tokens=3)
    outputs = []
    for own in (None, speculative):
        loaded = load(tmp_path / "target", torch.float32, CPU, select_kernels(CPU), own)
        outputs.append(generate(loaded, Way("drafts", 16, REPEATING)))
    assert outputs[0] == outputs[1]


def test_a_draft_model_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    save_tiny("olmo2", tmp_path / "target")
    save_tiny("gpt2", tmp_path / "draft", vocab_size=90)
    speculative = SpeculativeConfig("draft_model", model=str(tmp_path / "draft"))
    with pytest.raises(ConfigError, match="the draft model has 90 tokens and the model's 101"):
        load(tmp_path / "target", torch.float32, CPU, select_kernels(CPU), speculative)
