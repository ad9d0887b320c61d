"""Assistants of Gemma 4: drafts are those of `transformers`, also after a handoff, and change no token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.core.context import Context
from paceline.core.media import MediaKind
from paceline.core.types import Key, SamplingParams
from paceline.engine.request import Request
from paceline.kernels import select_kernels
from paceline.models.base import Model
from paceline.models.gemma4_assistant import Gemma4Assistant
from paceline.models.loader import load_assistant, load_model
from tests.engine.loops import CPU, DRAFTS, Loop, assert_same, expected
from tests.engine.media_models import media_model
from tests.engine.test_decode_loop import requests
from tests.tiny_checkpoints import write_gemma4_assistant, write_tiny

ALLOWED = (7, 31, 60)
"""With so few tokens to choose from, drafts of a random model are sometimes right."""
WINDOW = 8
DENSE = {"num_hidden_layers": 10, "layer_types": ["sliding_attention"] * 9 + ["full_attention"]}
"""A target whose sliding layers are in two KV groups."""

Pair = tuple[Model, Gemma4Assistant, Any, Any]


@pytest.fixture(params=["edge", "dense"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """A target and its assistant, loaded by Paceline, and the references that saved them."""
    return load_pair(request.param, tmp_path)


def load_pair(kind: str, tmp_path: Path, kernels: str = "native", heads: int = 4) -> Pair:
    if kind == "edge":
        own_heads = {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
        sizes = {"vocab_size": 104, "vocab_size_per_layer_input": 104}
        reference = write_tiny(tmp_path / "target", "gemma4", **sizes, **own_heads)
        drafter = write_gemma4_assistant(tmp_path / "assistant", centroids=True, vocab_size=104, **own_heads)
    else:
        reference = write_tiny(tmp_path / "target", "gemma4_dense", **DENSE)
        heads = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_attention_heads": 2}
        drafter = write_gemma4_assistant(tmp_path / "assistant", unified=True, **heads)
    own = torch.float32, select_kernels(CPU, kernels), CPU
    return load_model(tmp_path / "target", *own), load_assistant(tmp_path / "assistant", *own), reference, drafter


def reference_drafts(
    target: transformers.PreTrainedModel,
    assistant: transformers.PreTrainedModel,
    context: Sequence[int],
    count: int,
    media: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the best of the ALLOWED tokens in each of `count` passes of the reference of an assistant.

    Args:
        media: further inputs of the target.
    """
    config, kinds = target.config.get_text_config(), ("sliding_attention", "full_attention")
    own = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
    last = {kind: max(layer for layer, other in enumerate(own) if other == kind) for kind in kinds}
    cache = transformers.DynamicCache(config=config)
    drafts: list[int] = []
    with torch.inference_mode():
        out = target.model(torch.tensor([context[:-1]]), past_key_values=cache, **(media or {}))
        state = out.last_hidden_state[:, -1:]
        seen = {kind: (cache.layers[layer].keys, cache.layers[layer].values) for kind, layer in last.items()}
        # The newest token sees WINDOW keys, of which its own is not computed yet.
        keys, values = seen["sliding_attention"]
        seen["sliding_attention"] = keys[:, :, 1 - WINDOW :], values[:, :, 1 - WINDOW :]
        assert seen["full_attention"][0].shape[2] == len(context) - 1
        for _ in range(count):
            newest = torch.tensor([[[*context, *drafts][-1]]])
            given = torch.cat((target.get_input_embeddings()(newest), state), dim=-1)
            positions = torch.tensor([[len(context) - 1]])
            out = assistant(inputs_embeds=given, position_ids=positions, shared_kv_states=seen)
            state = out.last_hidden_state
            drafts.append(max(ALLOWED, key=lambda token: float(out.logits[0, 0, token])))
    return drafts


def check_drafts(pair: Pair, loop: Loop) -> None:
    drafted = loop.watched.drafted
    found = [drafts for _, drafts in drafted]
    assert found == [reference_drafts(*pair[2:], context, len(drafts)) for context, drafts in drafted]
    assert any(len(drafts) == DRAFTS for drafts in found)


def test_drafts_are_those_of_transformers(pair: Pair) -> None:
    asked = [
        ([*range(3, 3 + length)], SamplingParams(max_tokens=tokens, allowed_token_ids=ALLOWED))
        for length, tokens in ((1, 9), (5, 30), (21, 40), (50, 25))
    ]
    loop = Loop(pair[0], 2, "assistant", assistant=pair[1])
    loop.run(asked)
    loop.engine.stop()
    assert loop.given_back
    assert 0 < loop.engine.stats.accepted_tokens < loop.engine.stats.draft_tokens
    check_drafts(pair, loop)


@pytest.mark.parametrize("kind", ["edge", "experts"])
def test_drafts_after_an_image_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    made = media_model(kind, tmp_path / "target")
    drafter = write_gemma4_assistant(tmp_path / "assistant")
    assistant = load_assistant(tmp_path / "assistant", torch.float32, select_kernels(CPU, "native"), CPU)
    prompt = made.prompt(9, (MediaKind.IMAGE, made.tower_rows(1)), 5)
    loop = Loop(made.model, 2, "assistant", assistant=assistant)
    sampling = SamplingParams(max_tokens=20, allowed_token_ids=ALLOWED)
    loop.run([(prompt.token_ids, sampling)], [prompt.media])
    loop.engine.stop()
    assert len(loop.watched.drafted) > 2
    for context, drafts in loop.watched.drafted:
        media = made.inputs(prompt, torch.tensor([context[:-1]]))
        assert drafts == reference_drafts(made.reference, drafter, context, len(drafts), media)


# Rows that pad a step have arbitrary content, about which numpy warns in Triton's interpreter.
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:overflow ", "ignore:invalid value ", "ignore:divide by zero ")
def test_drafts_on_a_gpu_are_those_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    pair = load_pair("edge", tmp_path, "triton-invariant", heads=2)  # Triton's interpreter is slow
    loop = Loop(pair[0], 2, "assistant", assistant=pair[1])
    asked = [([*range(3, 12)], 6), ([5, 6], 2)]
    loop.run([(prompt, SamplingParams(max_tokens=tokens, allowed_token_ids=ALLOWED)) for prompt, tokens in asked])
    loop.engine.stop()
    check_drafts(pair, loop)


def test_a_request_that_was_handed_over_drafts_after_its_first_step(pair: Pair) -> None:
    prompt, sampling = [*range(3, 33)], SamplingParams(max_tokens=20, allowed_token_ids=ALLOWED)
    key, length = Key("a", 1, 1), len(prompt)
    prefill, decode = (Loop(pair[0], 2, "assistant", assistant=pair[1]) for _ in range(2))
    tables = prefill.tables()
    first = Request(key, Context(prompt), length, sampling, prefill.layout, tables, only_first_token=True)
    prefill.run_one(first)
    assert not prefill.watched.drafted
    decode.slots.copy_(prefill.slots)
    decode.run_one(Request(key, Context(first.token_ids), length, sampling, decode.layout, tables, length))
    assert len(decode.watched.drafted[0][0]) == length + 2
    check_drafts(pair, decode)


def test_drafts_change_no_token(pair: Pair) -> None:
    sampled = SamplingParams(temperature=0.9, seed=1, max_tokens=40, allowed_token_ids=ALLOWED)
    asked = [*requests(100)[:6], ([5, 6, 7], sampled), ([*range(40)], sampled)]
    wanted = expected(pair[0], asked)
    for steps_in_flight, contexts in ((1, None), (2, None), (2, 1), (2, 2.5)):
        loop = Loop(pair[0], steps_in_flight, "assistant", contexts_on_device=contexts, assistant=pair[1])
        assert_same(loop.run(asked), wanted)
        loop.engine.stop()
        assert 0 < loop.engine.stats.accepted_tokens < loop.engine.stats.draft_tokens


def test_drafts_can_be_drawn_at_random(pair: Pair) -> None:
    sampling = SamplingParams(temperature=0.9, max_tokens=40, allowed_token_ids=ALLOWED)
    asked = [([5, 6, 7], replace(sampling, seed=seed)) for seed in range(4)]
    loop = Loop(pair[0], 2, "assistant", assistant=pair[1], probabilistic=True)
    assert [len(tokens) for tokens in loop.run(asked)] == [40] * 4
    loop.engine.stop()
    assert 0 < loop.engine.stats.accepted_tokens < loop.engine.stats.draft_tokens
