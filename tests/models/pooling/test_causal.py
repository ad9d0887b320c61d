"""Pooling of hidden states that come in chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.core.errors import ConfigError, ModelError
from paceline.core.pooling import PoolWish
from paceline.core.pooling_choice import PoolingChoice
from paceline.models.pooling.causal import RunningPool, beginner, load_pooler
from tests.pooling_folders import write_modules

HIDDEN = 24
STATES = torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(1))


def write(folder: Path, architecture: str = "Qwen3Model", **fields: object) -> None:
    config = {"architectures": [architecture], "model_type": "qwen3", "hidden_size": HIDDEN}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512, **fields}))
    save_file({"norm.weight": torch.ones(HIDDEN)}, folder / "model.safetensors")


def pooled(running: RunningPool, ends: Sequence[int], again: int = 0) -> torch.Tensor:
    """Return the result of chunks that end there. Before the last chunk, the first `again` tokens come once more."""
    first = 0
    for end in ends:
        if end == ends[-1] and again:
            running.add(0, STATES[:again])
        running.add(first, STATES[first:end])
        first = end
    assert running.is_complete
    return running.result()


@pytest.mark.parametrize("mode", ["mean", "max", "cls", "weightedmean", "mean_sqrt_len_tokens"])
def test_chunks_and_states_that_come_again_change_no_bit(tmp_path: Path, mode: str) -> None:
    write(tmp_path)
    write_modules(tmp_path, mode, dense=(HIDDEN, 10), normalize=True)
    pooler = load_pooler(tmp_path, bidirectional=False)
    assert pooler is not None
    for task in ("embed", "token_embed"):
        begin = beginner(pooler, PoolWish(task))
        whole = pooled(begin([5] * 70, 0), [70])
        for ends in ([1, 2, 70], [16, 32, 48, 64, 70], [69, 70], list(range(1, 71))):
            assert torch.equal(pooled(begin([5] * 70, 0), ends), whole)
            assert torch.equal(pooled(begin([5] * 70, 0), ends, again=min(30, ends[-2])), whole)


def test_a_value_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    write(tmp_path)
    write_modules(tmp_path, "lasttoken", normalize=True)
    pooler = load_pooler(tmp_path, bidirectional=False)
    assert pooler is not None
    running = beginner(pooler, PoolWish("embed"))([5], 0)
    running.add(0, torch.full((1, HIDDEN), float("inf")))
    with pytest.raises(ModelError, match="not finite"):
        running.result()


def test_reward_models_have_two_layers(tmp_path: Path) -> None:
    layers = [torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 2)]
    score = torch.nn.Sequential(*layers)
    write(tmp_path, "Qwen2ForProcessRewardModel", num_labels=2)
    save_file({f"score.{name}": tensor for name, tensor in score.state_dict().items()}, tmp_path / "model.safetensors")
    pooler = load_pooler(tmp_path, bidirectional=False)
    assert pooler is not None
    found = pooled(beginner(pooler, PoolWish("token_classify"))([5] * 70, 0), [33, 70])
    torch.testing.assert_close(found, score(STATES).softmax(-1), atol=1e-5, rtol=0)


def test_of_a_process_reward_model_the_ends_of_steps_have_rewards(tmp_path: Path) -> None:
    write(tmp_path, "Qwen2ForProcessRewardModel", num_labels=2)
    tensors = {"score.0.weight": torch.randn(HIDDEN, HIDDEN), "score.0.bias": torch.randn(HIDDEN)}
    tensors |= {"score.2.weight": torch.randn(2, HIDDEN), "score.2.bias": torch.randn(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    added = {"added_tokens": [{"content": "<extra_0>", "id": 7}], "model": {"vocab": {"a": 5}}}
    pooler = load_pooler(tmp_path, bidirectional=False)
    (tmp_path / "tokenizer.json").write_text(json.dumps(added))
    stepped = load_pooler(tmp_path, bidirectional=False)
    assert pooler is not None
    assert stepped is not None
    ids = [7 if index in (3, 20, 69) else 5 for index in range(70)]
    every, steps = (pooled(beginner(each, PoolWish("token_classify"))(ids, 0), [33, 70]) for each in (pooler, stepped))
    assert torch.equal(steps, every[[3, 20, 69]])


@pytest.mark.parametrize("said", ["option", "config"])
def test_a_model_that_answers_yes_or_no_scores_by_one_row(said: str, tmp_path: Path) -> None:
    write(tmp_path, "Qwen3ForCausalLM", **({"classifier_from_token": ["no", "yes"]} if said == "config" else {}))
    head = torch.randn(9, HIDDEN)
    save_file({"lm_head.weight": head}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"yes": 4, "no": 6}}}))
    choice = PoolingChoice(task="score") if said == "option" else None
    pooler = load_pooler(tmp_path, bidirectional=False, choice=choice)
    assert pooler is not None
    assert pooler.config.tasks == {"score"}
    found = pooled(beginner(pooler, PoolWish("score"))([5] * 70, 0), [70])
    torch.testing.assert_close(found, torch.sigmoid(STATES[-1] @ (head[4] - head[6])).view(1, 1), atol=1e-6, rtol=0)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"yes": 4}}}))
    with pytest.raises(ModelError, match="no token 'no', from whose logit the score is computed"):
        load_pooler(tmp_path, bidirectional=False, choice=choice)


def test_a_model_attends_as_its_files_say(tmp_path: Path) -> None:
    write(tmp_path, use_bidirectional_attention=True)
    write_modules(tmp_path, "mean")
    assert load_pooler(tmp_path, bidirectional=True) is not None
    with pytest.raises(ModelError, match="attends in another way"):
        load_pooler(tmp_path, bidirectional=False)


def test_a_model_without_files_about_pooling_embeds_as_an_operator_says(tmp_path: Path) -> None:
    write(tmp_path, "Qwen3ForCausalLM")
    assert load_pooler(tmp_path, bidirectional=False) is None
    pooler = load_pooler(tmp_path, bidirectional=False, choice=PoolingChoice("mean", normalize=False))
    assert pooler is not None
    assert pooler.config.generates
    found = pooled(beginner(pooler, PoolWish("embed"))([5] * 70, 0), [70])
    torch.testing.assert_close(found, STATES.mean(0, keepdim=True))
    write_modules(tmp_path, "lasttoken")
    with pytest.raises(ConfigError, match="says itself how it pools"):
        load_pooler(tmp_path, bidirectional=False, choice=PoolingChoice())
