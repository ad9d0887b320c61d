"""Content of blocks that other requests may read: the decode loop has computed all of it from the right context."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.core.context import Context
from paceline.core.kv_layout import NO_SLOT
from paceline.core.types import Key, SamplingParams
from paceline.engine.request import Request
from paceline.engine.runner import layer_caches
from paceline.engine.speculation import Acceptance, Speculation
from paceline.models.base import Model
from tests.engine.loops import DRAFTS, FOREIGN, Loop, assert_same, expected, load


class Late(Speculation):
    """Speculation that drafts nothing at first."""

    def __init__(self) -> None:
        super().__init__(DRAFTS, adaptive=False)
        self.chosen = 0

    def choose(self, request: Acceptance) -> int:
        self.chosen += 1
        return DRAFTS if self.chosen > 70 else 0


def test_a_draft_model_that_begins_late_writes_to_no_block_that_was_given_back(save_gemma3, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    save_gemma3()
    model = load(tmp_path)
    loop = Loop(model, 2, "model", model, Late())
    asked = [([7, 8, 9] * 4, SamplingParams(max_tokens=140))]
    assert_same(loop.run(asked), expected(model, asked))
    loop.engine.stop()
    assert loop.engine.stats.draft_tokens > 0
    assert loop.given_back
    assert bool((loop.slots[sorted(loop.given_back)] == FOREIGN).all())


class Pattern(Speculation):
    """Speculation with numbers of drafts from a repeated pattern."""

    def __init__(self, *pattern: int) -> None:
        super().__init__(DRAFTS, adaptive=False)
        self._pattern = itertools.cycle(pattern)

    def choose(self, request: Acceptance) -> int:
        return next(self._pattern)


def draft_keys(loop: Loop, tables: Sequence[Sequence[int]], model: Model) -> list[list[torch.Tensor | None]]:
    """Return the keys of each token for each layer of the draft model; None if the token's block was given back."""
    first_layer = loop.layout.groups[len(model.group_shapes)].shape.layers[0]
    layers = {}
    for group, table in list(zip(loop.layout.groups, tables))[len(model.group_shapes) :]:
        for layer in group.shape.layers:
            cache = layer_caches(loop.layout, loop.slots.view(-1))[layer]
            places = [(slot, place) for slot in table for place in range(group.block_tokens)]
            layers[layer] = [None if slot == NO_SLOT else cache.keys[slot, :, place] for slot, place in places]
    return [layers[layer] for layer in sorted(layers) if layer >= first_layer]


@pytest.mark.parametrize(
    "pattern", [(0,), (3,), (3, 0, 0, 3), (2, 0, 0, 0, 0, 0, 0, 1), (0,) * 160 + (3,) * 30], ids=str
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_is_sealed_of_a_draft_models_cache_is_computed(
    family: str, pattern: tuple[int, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    save = request.getfixturevalue(f"save_{family}")
    save()
    model = load(tmp_path)
    save(initializer_range=0.05)
    draft_model = load(tmp_path)
    loop = Loop(model, 2, "model", draft_model, Pattern(*pattern))
    running = make_request(loop, [7, 8, 9] * 8, SamplingParams(max_tokens=220, temperature=0.8, seed=3))
    loop.run_one(running)
    found = draft_keys(loop, running.tables, model)
    alone = Loop(model, 1, "model", draft_model, Pattern(1))
    whole = make_request(alone, running.token_ids, SamplingParams(max_tokens=1))
    tables = [[*table] for table in whole.tables]
    alone.run_one(whole)
    wanted = draft_keys(alone, tables, model)
    groups = loop.layout.groups[len(model.group_shapes) :]
    sealed = [blocks * group.block_tokens for blocks, group in zip(running.sealed_blocks[-len(groups) :], groups)]
    assert max(sealed) > 64 if any(pattern) else max(sealed) <= 24
    for layer, (own, reference) in enumerate(zip(found, wanted)):
        group = next(
            index for index, group in enumerate(groups) if layer + model.config.num_layers in group.shape.layers
        )
        for keys, other in zip(own[: sealed[group]], reference):
            if keys is not None and other is not None:
                torch.testing.assert_close(keys, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=108),  # the last computed token fills a block
        SamplingParams(max_tokens=107),
        SamplingParams(
            max_tokens=200, temperature=0.8, seed=3, stop_token_ids=frozenset(range(0, 101, 13)), min_tokens=99
        ),
    ],
)
def test_what_is_sealed_of_a_hybrid_is_the_state_at_its_end(  # type: ignore[no-untyped-def]
    sampling: SamplingParams, save_granite_hybrid, tmp_path: Path
) -> None:
    save_granite_hybrid()
    model = load(tmp_path)
    loop, alone = Loop(model, 2, "none"), Loop(model, 1, "none")
    running = make_request(loop, [7, 8, 9] * 7, sampling)
    tables = [[*table] for table in running.tables]
    loop.run_one(running)
    whole = make_request(alone, running.token_ids, SamplingParams(max_tokens=1))
    other_tables = [[*table] for table in whole.tables]
    alone.run_one(whole)
    assert running.sealed_blocks[1] == (len(running.token_ids) - 1) // 64 > 0  # the newest token is never computed
    for block in range(running.sealed_blocks[1]):
        found, wanted = loop.slots[tables[1][block]], alone.slots[other_tables[1][block]]
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))  # padding is NaN


@pytest.mark.slow
@pytest.mark.parametrize("length", [23, 24, 25, 48, 49])
def test_prefill_leaves_no_hole_in_a_draft_models_cache(model: Model, length: int) -> None:
    loop = Loop(model, 2, "model", model)
    request = make_request(
        loop, [5 + i % 7 for i in range(length)], SamplingParams(max_tokens=9), only_first_token=True
    )
    tables = [[*table] for table in request.tables]
    loop.run_one(request)
    for keys in draft_keys(loop, tables, model):
        assert not any(bool(key.isnan().any()) for key in keys[max(0, length - 19) : length] if key is not None)


def make_request(loop: Loop, prompt: list[int], sampling: SamplingParams, only_first_token: bool = False) -> Request:
    key = Key("one", 1, 1)
    return Request(
        key, Context(prompt), len(prompt), sampling, loop.layout, loop.tables(), only_first_token=only_first_token
    )
