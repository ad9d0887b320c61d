"""The decode loop on tiny models: however it runs ahead and whatever it drafts, tokens are those of one at a time."""

from __future__ import annotations

import itertools
import queue
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.core.hashing import HashChain
from paceline.core.kv_layout import NO_SLOT, make_layout
from paceline.core.types import Key, SamplingParams, Token
from paceline.engine.device_pool import OnDevice
from paceline.engine.drafter import Drafter, ModelDrafter, PromptLookup
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.engine.rows import Inputs, Rows
from paceline.engine.runner import ModelRunner, layer_caches
from paceline.engine.sampler import Draft
from paceline.engine.scheduler import Limits, Scheduler
from paceline.engine.speculation import Acceptance, Speculation
from paceline.engine.step import Chunk, Event, Removed, Sampled, Trimmed
from paceline.kernels import select_kernels
from paceline.kernels.block_copies import BlockCopies
from paceline.models.base import Model
from paceline.models.loader import load_model

CPU = torch.device("cpu")
MAX_TOKENS = 256
DRAFTS = 4
FOREIGN = 7.0
"""What somebody else has written into a block that was given back."""

Asked = tuple[list[int], SamplingParams]


def load(folder: Path) -> Model:
    return load_model(folder, torch.float32, select_kernels(CPU, "native"), CPU)


@pytest.fixture(params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    request.getfixturevalue(f"save_{request.param}")()
    return load(tmp_path)


def requests(vocab_size: int) -> list[Asked]:
    """Prompts that repeat themselves, so that lookups find something, and every way of choosing tokens."""
    rng = random.Random(3)
    ways = [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=1, logprobs=2),
        SamplingParams(temperature=1.3, seed=2, top_k=20, top_p=0.9, min_p=0.01),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
        SamplingParams(temperature=0.3, seed=3, logit_bias={5: 4.0, 6: -50.0}),
        SamplingParams(stop_token_ids=frozenset(range(0, vocab_size, 9)), min_tokens=4),
        SamplingParams(temperature=0.05, seed=4, allowed_token_ids=tuple(range(10, 16))),
        SamplingParams(logprobs=1, prompt_logprobs=1),
    ]
    asked = []
    for index, way in enumerate(ways):
        piece = [rng.randrange(3, 100) for _ in range(rng.randint(2, 12))]
        asked.append(((piece * 8)[: rng.randint(1, 60)], replace(way, max_tokens=rng.choice([1, 7, 40, 70]) + index)))
    return asked


class Loop:
    """An engine over a pool of NaN; each request has all of its blocks from the beginning, in shuffled slots."""

    def __init__(
        self,
        model: Model,
        steps_in_flight: int,
        drafter: str,
        draft_model: Model | None = None,
        speculation: Speculation | None = None,
        contexts_on_device: float | None = None,
    ) -> None:
        shapes = model.group_shapes
        layers = model.config.num_layers
        if draft_model is not None:
            shapes += tuple(
                replace(
                    shape,
                    name=f"draft-{shape.name}",
                    layers=tuple(layers + layer for layer in shape.layers),
                    drafter=True,
                )
                for shape in draft_model.group_shapes
            )
        self.layout = make_layout(shapes, 4, "test")
        count = 8 * self.layout.slots_for(MAX_TOKENS)
        self.slots = torch.full((count, self.layout.slot_bytes // 4), float("nan"))
        pool, copies, residency = self.slots.view(-1), None, None
        if contexts_on_device is not None:
            here = round(contexts_on_device * self.layout.slots_for(MAX_TOKENS))
            pool = torch.full((here * self.layout.slot_bytes // 4,), float("nan"))
            copies = BlockCopies(pool.view(here, -1), self.slots)
            residency = OnDevice(self.layout, here)
        self.given_back: set[int] = set()
        self._slots = random.Random(1).sample(range(count), count)
        caches = layer_caches(self.layout, pool)
        drafters: dict[str, Drafter | None] = {
            "none": None,
            "lookup": PromptLookup(1, 3),
            "early": ModelDrafter(model, caches, layers=layers - 1),
            "head": Head(model, layers - 1),
        }
        if draft_model is not None:
            drafters["model"] = ModelDrafter(draft_model, caches[layers:], first_group=len(model.group_shapes))
        limits = Limits(24, MAX_TOKENS, 8, 0 if drafter == "none" else DRAFTS)
        self._events: queue.Queue[Event] = queue.Queue()
        self._failures: list[BaseException] = []
        self.engine = Engine(
            Scheduler(limits, speculation or Speculation(limits.max_drafts, adaptive=False), residency),
            ModelRunner(model, self.layout, pool, limits, drafters[drafter]),
            lambda events: [self._events.put(event) for event in events] and None,
            self._failures.append,
            steps_in_flight,
            copies=copies,
        )
        self.engine.start()

    def tables(self) -> list[list[int]]:
        """Blocks for one request."""
        return [[self._slots.pop() for _ in range(group.blocks_for(MAX_TOKENS))] for group in self.layout.groups]

    def run_one(self, request: Request) -> None:
        """Runs a request to its end, and ends the engine."""
        self.engine.add(request)
        while not isinstance(event := self._events.get(timeout=30), Sampled) or not (
            event.reason or request.only_first_token
        ):
            assert not self._failures
        self.engine.stop()

    def run(self, asked: Sequence[Asked]) -> list[list[Token]]:
        """Runs requests side by side, each from the first token on."""
        outputs: dict[Key, list[Token]] = {}
        own: dict[Key, list[list[int]]] = {}
        for index, (prompt, sampling) in enumerate(asked):
            tables = self.tables()
            key = Key(str(index), 1, 1)
            own[key] = [[*table] for table in tables]
            outputs[key] = []
            chain = HashChain(self.layout.fingerprint)
            self.engine.add(Request(key, [*prompt], len(prompt), sampling, self.layout, chain, tables))
        left = set(outputs)
        while left:
            event = self._events.get(timeout=30)
            assert not self._failures
            if isinstance(event, Sampled):
                outputs[event.key].append(event.token)
                if event.reason is not None:
                    self.engine.remove(event.key)
            elif isinstance(event, Trimmed):
                behind = set(own[event.key][event.group][: event.first_kept_block]) - self.given_back
                self.slots[sorted(behind)] = FOREIGN
                self.given_back |= behind
            elif isinstance(event, Removed):
                left.remove(event.key)
        return list(outputs.values())


def expected(model: Model, asked: Sequence[Asked]) -> list[list[Token]]:
    """Each request alone, one step at a time, without drafts."""
    outputs = []
    for one in asked:
        loop = Loop(model, 1, "none")
        outputs += loop.run([one])
        loop.engine.stop()
    return outputs


def assert_same(found: list[list[Token]], wanted: list[list[Token]]) -> None:
    assert [[token.id for token in tokens] for tokens in found] == [[token.id for token in tokens] for tokens in wanted]
    for token, other in zip(itertools.chain(*found), itertools.chain(*wanted)):
        assert [entry.logprob for entry in token.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-3
        )


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
    """Some requests wait for room in the pool, and those that come behind others load what these have stored."""
    asked = requests(model.config.vocab_size)
    wanted = expected(model, asked)
    for contexts in (1, 2.5):
        loop = Loop(model, 2, drafter, model if drafter == "model" else None, contexts_on_device=contexts)
        assert_same(loop.run(asked), wanted)
        loop.engine.stop()
        assert loop.engine.stats.stored_blocks > 0


def test_tokens_of_a_hybrid_do_not_depend_on_how_the_loop_runs(save_granite_hybrid, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    save_granite_hybrid()
    model = load(tmp_path)
    asked = requests(model.config.vocab_size)
    wanted = expected(model, asked)
    for contexts in (None, 1, 2.5):
        loop = Loop(model, 2, "none", contexts_on_device=contexts)
        assert_same(loop.run(asked), wanted)
        loop.engine.stop()
        assert loop.given_back


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
    assert engine.busy_seconds > 0
    assert engine.plan_seconds > 0
    assert engine.output_seconds > 0
    assert engine.bubble_seconds >= 0
    # Of a single request, the time of its steps is that of all.
    stats = engine.stats
    in_model, beside = (
        [getattr(stats, f"{phase}_{kind}_seconds") for phase in ("prefill", "decode")] for kind in ("model", "other")
    )
    assert min(in_model + beside) > 0
    assert sum(in_model + beside) <= engine.busy_seconds


class Head:
    """A head on the model's hidden states, as a trained one is: it drafts one token from the last state it has seen."""

    fills_kv = False

    def __init__(self, model: Model, depth: int) -> None:
        self.taps = (depth,)
        self._model = model
        self._last: dict[int, torch.Tensor] = {}

    def observe(self, rows: Rows, chunks: Sequence[Chunk], inputs: Inputs, states: Mapping[int, torch.Tensor]) -> None:
        spans = zip(inputs.batch.query_start, inputs.batch.query_start[1:])
        for chunk, start, (first, end) in zip(chunks, inputs.starts, spans):
            # Behind an accepted context its newest token is not computed yet; the state before it is.
            behind = int(rows.lengths[chunk.row]) - 2 - start
            if 0 <= behind < end - first:
                self._last[chunk.row] = states[self.taps[0]][first + behind]

    def draft(self, rows: Rows, wanted: Mapping[int, int]) -> int:
        for row in wanted:
            token = int(self._model.logits(self._last[row].unsqueeze(0)).argmax())
            rows.draft(row, [Draft(token)])
        return len(wanted)


def test_a_head_sees_hidden_states_and_drafts_from_them(model: Model) -> None:
    asked = requests(model.config.vocab_size)
    loop = Loop(model, 2, "head")
    assert_same(loop.run(asked), expected(model, asked))
    loop.engine.stop()
    assert loop.engine.stats.draft_tokens > 50


class Late(Speculation):
    """Drafts nothing at first."""

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
    """Drafts as many tokens as the pattern says, over and over."""

    def __init__(self, *pattern: int) -> None:
        super().__init__(DRAFTS, adaptive=False)
        self._pattern = itertools.cycle(pattern)

    def choose(self, request: Acceptance) -> int:
        return next(self._pattern)


def draft_keys(loop: Loop, tables: Sequence[Sequence[int]], model: Model) -> list[list[torch.Tensor | None]]:
    """For each layer of the draft model, the keys of each token; None where its block was given back."""
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
        SamplingParams(max_tokens=108),  # the last token that is computed fills a block
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
    chain = HashChain(loop.layout.fingerprint)
    key = Key("one", 1, 1)
    return Request(
        key, [*prompt], len(prompt), sampling, loop.layout, chain, loop.tables(), only_first_token=only_first_token
    )
