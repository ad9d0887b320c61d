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
from paceline.core.kv_layout import make_layout
from paceline.core.types import Key, SamplingParams, Token
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
from paceline.models.base import Model
from paceline.models.loader import load_model

CPU = torch.device("cpu")
MAX_TOKENS = 256
DRAFTS = 4
FOREIGN = 7.0
"""What somebody else has written into a block that was given back."""

Asked = tuple[list[int], SamplingParams]


def load(folder: Path) -> Model:
    return load_model(folder, torch.float32, select_kernels(CPU, "reference"), CPU)


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
    ) -> None:
        shapes = model.group_shapes
        layers = model.config.num_layers
        if draft_model is not None:
            shapes += tuple(
                replace(shape, name=f"draft-{shape.name}", layers=tuple(layers + layer for layer in shape.layers))
                for shape in draft_model.group_shapes
            )
        self.layout = make_layout(shapes, 4, "test")
        count = 8 * self.layout.slots_for(MAX_TOKENS)
        pool = torch.full((count * self.layout.slot_bytes // 4,), float("nan"))
        self.slots = pool.view(count, -1)
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
            Scheduler(limits, speculation or Speculation(limits.max_drafts, adaptive=False)),
            ModelRunner(model, self.layout, pool, limits, drafters[drafter]),
            lambda events: [self._events.put(event) for event in events] and None,
            self._failures.append,
            steps_in_flight,
        )
        self.engine.start()

    def run(self, asked: Sequence[Asked]) -> list[list[Token]]:
        """Runs requests side by side, each from the first token on."""
        outputs: dict[Key, list[Token]] = {}
        own: dict[Key, list[list[int]]] = {}
        for index, (prompt, sampling) in enumerate(asked):
            tables = [[self._slots.pop() for _ in range(g.blocks_for(MAX_TOKENS))] for g in self.layout.groups]
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
    assert engine.host_seconds > 0
    assert engine.bubble_seconds >= 0


class Head:
    """A head on the model's hidden states, as a trained one is: it drafts one token from the last state it has seen."""

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

    def draft(self, rows: Rows, wanted: dict[int, int]) -> None:
        for row in wanted:
            token = int(self._model.logits(self._last[row].unsqueeze(0)).argmax())
            rows.draft(row, [Draft(token)])


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
