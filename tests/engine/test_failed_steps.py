"""A step that computes NaN fails its own requests. None of its blocks reaches another request, however it is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.context import Context
from paceline.core.kv_layout import NO_SLOT, make_layout
from paceline.core.prefix import match_prefix
from paceline.core.types import Key, SamplingParams
from paceline.engine.device_pool import DevicePool
from paceline.engine.drafter import Drafter, ModelDrafter, NewestStates
from paceline.engine.limits import Limits
from paceline.engine.request import Request
from paceline.engine.rows import Rows
from paceline.engine.runner import ModelRunner, layer_caches
from paceline.engine.sampler import Draft
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculation import Speculation
from paceline.engine.step import Event, Failed, Filled, Sampled, Sealed
from paceline.kernels import select_kernels
from paceline.kernels.block_copies import BlockCopies
from paceline.kernels.interface import ForwardInputs
from paceline.models.base import EncodedRows, Model
from paceline.models.loader import load_model
from tests.engine.loops import NO_GRAMMARS
from tests.tiny_checkpoints import SaveTiny

CPU = torch.device("cpu")
MAX_TOKENS = 256
CHUNK = 64
PROMPT = [5 + i * i % 89 for i in range(180)]
OTHER = [7, 8, 9] * 5
DRAFTS = 3


class FailsOnce:
    """A model whose `call`-th forward pass reads NaN in place of the embedding of its `place`-th token."""

    def __init__(self, model: Model, call: int = 0, place: int = 0) -> None:
        self._model = model
        self._left = call
        self._place = place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, inputs: ForwardInputs, wanted: Sequence[int] | None, encoded: None) -> torch.Tensor:
        self._left -= 1
        rows = None
        if self._left == 0:
            nan = torch.full((1, self._model.config.encoding_size), float("nan"))  # type: ignore[attr-defined]
            rows = EncodedRows(torch.tensor([self._place % len(inputs.token_ids)]), nan)
        return self._model.forward(inputs, wanted, rows)


class Knowing:
    """A drafter that drafts what follows in a known context."""

    fills_kv, taps = False, ()

    def __init__(self, context: Sequence[int]) -> None:
        self._context = context

    def observe(self, *args: object) -> None:
        """Learn nothing."""

    def draft(self, rows: Rows, wanted: Mapping[int, int], newest: NewestStates) -> int:
        for row, count in wanted.items():
            known = self._context[rows.lengths[row] :][:count]
            rows.draft(row, [Draft(token) for token in known])
        return sum(rows.drafts[row] for row in wanted)


class Host:
    """One arena, and the names of its sealed blocks. Engines come and go."""

    def __init__(self, model: Model, draft_model: Model | None = None, is_on_device: bool = False) -> None:
        shapes, layers = model.group_shapes, len(model.layer_groups)
        if draft_model is not None:
            shapes += tuple(shape.of_drafter(layers) for shape in draft_model.group_shapes)
        self.layout = make_layout(shapes, 4, "test", DRAFTS)
        count = 6 * self.layout.slots_for(MAX_TOKENS)
        self.arena = torch.full((count, self.layout.slot_bytes // 4), float("nan"))
        self._free = list(range(count))
        self._is_on_device = is_on_device
        self.sealed: dict[tuple[int, bytes], int] = {}

    def request(self, name: str, tokens: Sequence[int], max_tokens: int, **how: bool) -> Request:
        """Make a request that reuses the blocks that are sealed."""
        context, groups = Context(tokens), self.layout.groups
        links = context.links(self.layout.fingerprint)
        length, found = match_prefix(self.layout, lambda *name: self.sealed.get(name), links, len(tokens) - 1)
        tables = [[*own, *self._fresh(group.blocks_for(MAX_TOKENS) - len(own))] for group, own in zip(groups, found)]
        sampling = SamplingParams(max_tokens=max_tokens)
        return Request(Key(name, 1, 1), context, len(tokens), sampling, self.layout, tables, length, **how)

    def _fresh(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def run(self, model: Any, *requests: Request, drafter: Drafter | None = None) -> list[Event]:
        """Run requests to their ends on a new engine."""
        count, pool, own = 3 * self.layout.slots_for(MAX_TOKENS), self.arena, None
        if self._is_on_device:
            pool, own = torch.full((count, self.arena.shape[1]), float("nan")), DevicePool(self.layout, count)
        if isinstance(drafter, ModelDrafter):
            drafter._caches = layer_caches(self.layout, pool.view(-1))[len(model.layer_groups) :]
        copies = BlockCopies(pool, self.arena) if self._is_on_device else None
        limits = Limits(CHUNK + 1, MAX_TOKENS, 4, DRAFTS if drafter else 0)
        scheduler = Scheduler(limits, Speculation(limits.max_drafts, adaptive=False), own)
        runner = ModelRunner(model, self.layout, pool.view(-1), limits, NO_GRAMMARS, drafter)
        tables = {request.key: [[*table] for table in request.tables] for request in requests}
        events: list[Event] = []
        for request in requests:
            scheduler.add(request)
        while not all(request.key in {event.key for event in events if ends(event)} for request in requests):
            for batch in scheduler.take_copies():
                assert copies is not None
                for moves, copy in ((batch.loads, copies.load), (batch.stores, copies.store)):
                    ends_of = [(own.arena_slot, own.pool_slot)[:: 1 if moves is batch.loads else -1] for own in moves]
                    if moves:
                        copy(*zip(*ends_of)).wait()
                scheduler.finish_copies(batch, 1e-3, 0.0)
            if (step := scheduler.plan()) is not None:
                scheduler.apply(step, runner.execute(step))
            events += scheduler.take_events()
        for event in events:
            if isinstance(event, Sealed):
                slots = tables[event.key][event.group][event.first_block :]
                self.sealed.update({(event.group, name): slot for name, slot in zip(event.hashes, slots)})
        assert NO_SLOT not in self.sealed.values()
        return events


def ends(event: Event) -> bool:
    return isinstance(event, Failed | Filled) or (isinstance(event, Sampled) and event.reason is not None)


def tokens_of(events: Sequence[Event], name: str) -> list[int]:
    return [event.token.id for event in events if isinstance(event, Sampled) and event.key.request_id == name]


def failures(events: Sequence[Event]) -> list[str]:
    return [event.key.request_id for event in events if isinstance(event, Failed)]


FAMILIES = [
    "llama",
    "granite_hybrid",
    *(pytest.param(family, marks=pytest.mark.thorough) for family in ("gemma3", "qwen3_next", "gemma4")),
]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    request.getfixturevalue(f"save_{request.param}")()
    return load_model(tmp_path, torch.float32, select_kernels(CPU, "native"), CPU)


@pytest.mark.parametrize(
    ("call", "place", "is_on_device"),
    [(1, 20, False), (2, 1, True), (3, -1, False), (4, -1, True), (5, 1, False), (20, 0, True)],
)
def test_a_healthy_engine_answers_what_a_failed_one_was_asked(
    model: Model, call: int, place: int, is_on_device: bool
) -> None:
    reference = Host(model)
    wanted = reference.run(model, reference.request("a", PROMPT, 30), reference.request("b", OTHER, 30))
    host = Host(model, is_on_device=is_on_device)
    # Each step has a token of b, and then a chunk of a. The first one has the whole prompt of b.
    broken = host.run(FailsOnce(model, call, place), host.request("b", OTHER, 30), host.request("a", PROMPT, 30))
    failed, sound = ("b", "a") if place == 0 else ("a", "b")
    assert failures(broken) == [failed]
    assert tokens_of(broken, sound) == tokens_of(wanted, sound)
    for name, prompt in (("a", PROMPT), ("b", OTHER)):
        whole = [*prompt, *tokens_of(wanted, name)]
        for tokens in (whole[:-1], prompt):
            again = host.run(model, host.request(name, tokens, len(whole) - len(tokens)))
            assert tokens_of(again, name) == whole[len(tokens) :]


@pytest.mark.parametrize("place", [0, 1, DRAFTS])
def test_nan_among_verified_drafts_is_found_by_nobody(model: Model, place: int) -> None:
    reference = Host(model)
    whole = [*PROMPT, *tokens_of(reference.run(model, reference.request("a", PROMPT, 60)), "a")]
    for call in (5, 8):
        host = Host(model)
        events = host.run(FailsOnce(model, call, place), host.request("a", PROMPT, 60), drafter=Knowing(whole))
        # Attention may carry NaN of a draft to the token before it, because it multiplies hidden values by 0.
        assert failures(events) == ["a"] or place > 0
        answer = tokens_of(events, "a")
        assert answer == whole[len(PROMPT) :][: len(answer)]
        again = host.run(model, host.request("a", whole[:-1], 1))
        assert tokens_of(again, "a") == whole[-1:]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_blocks_of_a_failed_step_are_not_handed_over(model: Model, call: int) -> None:
    for readers in (False, True):
        host = Host(model)
        asked = host.request("a", PROMPT, 1, only_first_token=True, has_readers=readers)
        events = host.run(FailsOnce(model, call, 40), asked)
        computed = (call - 1) * CHUNK
        assert failures(events) == ["a"]
        assert not any(isinstance(event, Filled | Sampled) for event in events)
        for event in events:
            if isinstance(event, Sealed):
                end = (event.first_block + len(event.hashes)) * host.layout.groups[event.group].block_tokens
                assert end <= computed


def test_nan_of_a_draft_model_is_in_no_sealed_block_and_costs_only_drafts(save_llama: SaveTiny, tmp_path: Path) -> None:
    save_llama()
    model = load_model(tmp_path, torch.float32, select_kernels(CPU, "native"), CPU)
    reference = Host(model, model)
    wanted = tokens_of(reference.run(model, reference.request("a", PROMPT, 30)), "a")
    for call in range(1, 8):
        host = Host(model, model)
        host.arena.zero_()  # the padding of blocks, too
        draft_model: Any = FailsOnce(model, call)
        drafter = ModelDrafter(draft_model, [], first_group=len(model.group_shapes))
        assert tokens_of(host.run(model, host.request("a", PROMPT, 30), drafter=drafter), "a") == wanted
        slots = [slot for (group, _), slot in host.sealed.items() if host.layout.groups[group].shape.drafter]
        assert bool(host.arena[slots].isfinite().all())
