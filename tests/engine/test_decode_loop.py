"""The decode loop on tiny models. With any running ahead and any drafts, tokens are those of one request at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.types import SamplingParams
from paceline.models.base import Model
from tests.engine.loops import Asked, Loop, assert_same, expected, load
from tests.tiny_checkpoints import DIVIDED, SaveTiny, write_tiny


def requests(vocab_size: int) -> list[Asked]:
    """Return prompts that repeat themselves, so that lookups find drafts, with every kind of sampling."""
    rng = random.Random(3)
    ways = [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=1, logprobs=2, logprob_token_ids=(7, 5)),
        SamplingParams(temperature=1.3, seed=2, top_k=20, top_p=0.9, min_p=0.01),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
        SamplingParams(temperature=0.3, seed=3, logit_bias={5: 4.0, 6: -50.0}, bad_words=((5, 5), (5, 7, 5), (8,))),
        SamplingParams(stop_token_ids=frozenset(range(0, vocab_size, 9)), min_tokens=4),
        SamplingParams(temperature=0.05, seed=4, allowed_token_ids=tuple(range(10, 16))),
        SamplingParams(logprobs=1, prompt_logprobs=1),
    ]
    asked = []
    for index, way in enumerate(ways):
        piece = [rng.randrange(3, 100) for _ in range(rng.randint(2, 12))]
        asked.append(((piece * 8)[: rng.randint(1, 60)], replace(way, max_tokens=rng.choice([1, 7, 40, 70]) + index)))
    return asked


@pytest.mark.parametrize("drafter", ["none", "lookup", "early", "model"])
def test_tokens_do_not_depend_on_how_the_loop_runs(model: Model, drafter: str, save_llama, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    asked = requests(model.config.vocab_size)
    wanted = expected(model, asked)
    draft_model = None
    if drafter == "model":
        save_llama(num_hidden_layers=2, vocab_size=model.config.vocab_size, head_dim=16)
        draft_model = load(tmp_path)
    for steps_in_flight in (1, 2):
        loop = Loop(model, steps_in_flight, drafter, draft_model)
        assert_same(loop.run(asked), wanted)
        loop.engine.stop()
        stats = loop.engine.stats
        assert (stats.draft_tokens > 0) == (drafter != "none")
        assert stats.accepted_tokens <= stats.draft_tokens


@pytest.mark.parametrize("drafter", ["none", "lookup", "model"])
def test_tokens_do_not_depend_on_where_blocks_lie(model: Model, drafter: str) -> None:
    # Some requests wait for room in the pool, and later requests load blocks that earlier ones have stored.
    asked = requests(model.config.vocab_size)
    wanted = expected(model, asked)
    for contexts in (1, 2.5):
        loop = Loop(model, 2, drafter, model if drafter == "model" else None, contexts_on_device=contexts)
        assert_same(loop.run(asked), wanted)
        loop.engine.stop()
        assert loop.engine.stats.stored_blocks > 0


@pytest.mark.parametrize(
    ("drafter", "pools"), [("none", (1,)), ("lookup", (2.5,)), ("early", (None, 1, 2.5)), ("model", (None, 1))]
)
def test_tokens_of_a_hybrid_do_not_depend_on_how_the_loop_runs(
    drafter: str, pools: Sequence[float | None], tmp_path: Path
) -> None:
    heads = {"num_key_value_heads": 6}  # so that blocks are small enough for some to be given back
    write_tiny(tmp_path / "target", "granite_hybrid", **heads)
    model, draft_model = load(tmp_path / "target"), None
    if drafter == "model":  # nearly the same model, so that it is right most of the time
        write_tiny(tmp_path / "drafter", "granite_hybrid", **heads, residual_multiplier=0.69)
        draft_model = load(tmp_path / "drafter")
    asked = requests(model.config.vocab_size)
    wanted = expected(model, asked)
    for contexts in pools:
        loop = Loop(model, 2, drafter, draft_model, contexts_on_device=contexts)
        assert_same(loop.run(asked), wanted)
        loop.engine.stop()
        assert loop.given_back
        stats = loop.engine.stats
        if drafter != "none":
            assert 0 < stats.accepted_tokens < stats.draft_tokens


OTHER_LAYOUTS: dict[str, tuple[str, dict[str, object]]] = {
    "latent vectors": ("save_deepseek_v2", {"first_k_dense_replace": 3}),
    "divided groups": ("save_gemma3", DIVIDED),
    "layers without KV": ("save_gemma4", {}),
}


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_tokens_of_other_layouts_do_not_depend_on_how_the_loop_runs(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    family, changes = OTHER_LAYOUTS[name]
    request.getfixturevalue(family)(**changes)
    model = load(tmp_path)
    asked = requests(model.config.vocab_size)
    wanted = expected(model, asked)
    for drafter, contexts in (("early", None), ("none", 1), ("lookup", 2.5)):
        loop = Loop(model, 2, drafter, contexts_on_device=contexts)
        assert_same(loop.run(asked), wanted)
        loop.engine.stop()
        assert (loop.engine.stats.stored_blocks > 0) == (contexts is not None)


def test_a_draft_model_may_have_layers_without_kv(save_gemma4: SaveTiny, tmp_path: Path) -> None:
    save_gemma4()
    model = load(tmp_path)
    asked = requests(model.config.vocab_size)
    loop = Loop(model, 2, "model", model)
    assert_same(loop.run(asked), expected(model, asked))
    loop.engine.stop()
    assert loop.engine.stats.accepted_tokens > 0


def test_a_draft_model_that_is_the_target_is_always_right(model: Model) -> None:
    loop = Loop(model, 2, "model", model)
    asked = [
        ([7, 8, 9], SamplingParams(temperature=1.0, seed=5, max_tokens=60)),
        ([4] * 30, SamplingParams(max_tokens=60)),
    ]
    assert_same(loop.run(asked), expected(model, asked))
    loop.engine.stop()
    assert loop.engine.stats.accepted_tokens == loop.engine.stats.draft_tokens > 0


def test_work_is_seen_as_busy_time_or_bubble(model: Model) -> None:
    loop = Loop(model, 2, "none")
    loop.run([([5, 6, 7], SamplingParams(max_tokens=50))])
    loop.engine.stop()
    engine = loop.engine
    assert engine.stats.steps >= 50
    assert engine.computing.busy_seconds > 0
    assert engine.plan_seconds > 0
    assert engine.output_seconds > 0
    assert engine.computing.bubble_seconds >= 0
    # There is only one request, so the time of its steps is the time of all steps.
    stats = engine.stats
    in_model, beside = (
        [getattr(stats, f"{phase}_{kind}_seconds") for phase in ("prefill", "decode")] for kind in ("model", "other")
    )
    assert min(in_model + beside) > 0
    assert sum(in_model + beside) <= engine.computing.busy_seconds


@pytest.mark.slow
def test_a_head_sees_hidden_states_and_drafts_from_them(model: Model) -> None:
    asked = requests(model.config.vocab_size)
    loop = Loop(model, 2, "head")
    assert_same(loop.run(asked), expected(model, asked))
    loop.engine.stop()
    assert loop.engine.stats.draft_tokens > 50
