"""The decode loop over a pool that reveals wrong reads and writes."""

from __future__ import annotations

import itertools
import queue
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.context import Context
from paceline.core.kv_layout import make_layout
from paceline.core.media import MediaSpan
from paceline.core.types import Key, SamplingParams, Token
from paceline.engine.assistant import AssistantDrafter
from paceline.engine.constraint import Grammars
from paceline.engine.device_pool import DevicePool
from paceline.engine.drafter import Drafter, ModelDrafter, NewestStates, PromptLookup
from paceline.engine.engine import Engine
from paceline.engine.limits import Limits
from paceline.engine.request import Request
from paceline.engine.rows import Inputs, Rows
from paceline.engine.runner import ModelRunner, layer_caches
from paceline.engine.sampler import Draft
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculation import Speculation
from paceline.engine.step import Chunk, Computed, Event, Failed, Removed, Sampled, Sealed, States, Trimmed
from paceline.kernels import select_kernels
from paceline.kernels.block_copies import BlockCopies
from paceline.models.adapters.loading import LoadedAdapter
from paceline.models.base import Model
from paceline.models.compiled import CompiledModel
from paceline.models.gemma4_assistant import Gemma4Assistant
from paceline.models.loader import load_model
from paceline.models.model_config import ModelConfig
from paceline.models.transformers_backend.model import TransformersModel

CPU = torch.device("cpu")
MAX_TOKENS = 256
DRAFTS = 4
FOREIGN = 7.0
"""Content of a block that was given back, as if another request had written it."""

NO_GRAMMARS = Grammars(Path())
"""Grammars for requests without a constraint."""

Asked = tuple[list[int], SamplingParams]

Media = Sequence[tuple[MediaSpan, torch.Tensor]]
"""The spans of a prompt, and the encoding [length, hidden] of each."""


def load(folder: Path) -> Model:
    return load_model(folder, torch.float32, select_kernels(CPU, "native"), CPU)


class Head:
    """A head on the model's hidden states, like a trained one. It drafts one token from the last state that it saw."""

    fills_kv = False

    def __init__(self, model: Model, depth: int) -> None:
        self.taps = (depth,)
        self._model = model
        self._last: dict[int, torch.Tensor] = {}

    def observe(self, rows: Rows, chunks: Sequence[Chunk], inputs: Inputs, states: Mapping[int, torch.Tensor]) -> None:
        spans = zip(inputs.batch.query_start, inputs.batch.query_start[1:])
        for chunk, start, (first, end) in zip(chunks, inputs.starts, spans):
            # The newest token of an accepted context is not computed yet, so use the state of the token before it.
            behind = int(rows.lengths[chunk.row]) - 2 - start
            if 0 <= behind < end - first:
                self._last[chunk.row] = states[self.taps[0]][first + behind]

    def draft(self, rows: Rows, wanted: Mapping[int, int], newest: NewestStates) -> int:
        for row in wanted:
            token = int(self._model.logits(self._last[row].unsqueeze(0)).values.argmax())
            rows.draft(row, [Draft(token)])
        return len(wanted)


class Watched(AssistantDrafter):
    """An assistant's drafter that notes each context and the drafts after it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.drafted: list[tuple[list[int], list[int]]] = []

    def draft(self, rows: Rows, wanted: Mapping[int, int], newest: NewestStates) -> int:
        count = super().draft(rows, wanted, newest)
        self.drafted += [(rows.context(row).tolist(), [own.token for own in rows.drafts_of(row)]) for row in wanted]
        return count


class Loop:
    """An engine over a pool of NaN. Each request gets all its blocks at the beginning, in shuffled slots."""

    def __init__(
        self,
        model: Model,
        steps_in_flight: int,
        drafter: str,
        draft_model: Model | None = None,
        speculation: Speculation | None = None,
        contexts_on_device: float | None = None,
        grammars: Grammars | None = None,
        assistant: Gemma4Assistant | None = None,
        probabilistic: bool = False,
        code: str = "",
        budget: int = 24,
    ) -> None:
        shapes = model.group_shapes
        layers = len(model.layer_groups)
        if draft_model is not None:
            shapes += tuple(shape.of_drafter(layers) for shape in draft_model.group_shapes)
        shapes = tuple(shape.coded(code) for shape in shapes)
        drafts = 0 if drafter == "none" else DRAFTS
        self.layout = make_layout(shapes, 4, "test", drafts)
        count = 8 * self.layout.slots_for(MAX_TOKENS)
        self.slots = torch.full((count, self.layout.slot_bytes // 4), float("nan"))
        pool, copies, own = self.slots.view(-1), None, None
        if contexts_on_device is not None:
            here = round(contexts_on_device * self.layout.slots_for(MAX_TOKENS))
            pool = torch.full((here * self.layout.slot_bytes // 4,), float("nan"))
            copies = BlockCopies(pool.view(here, -1), self.slots)
            own = DevicePool(self.layout, here)
        self.given_back: set[int] = set()
        self.sealed: list[Sealed] = []
        """Events of this kind that came while `states` ran."""
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
        if assistant is not None:
            assert isinstance(model, CompiledModel)
            self.watched = drafters["assistant"] = Watched(assistant, model, caches, probabilistic)
        own_adapters = model.adapters if isinstance(model, CompiledModel) else None
        slots = 0 if own_adapters is None else own_adapters.slots
        limits = Limits(budget, MAX_TOKENS, 8, drafts, model.config.whole_media, model.config.bidirectional, slots)
        self._encodings = Encodings(model, self.slots)
        chosen = drafters[drafter]
        self._events: queue.Queue[Event] = queue.Queue()
        self._failures: list[BaseException] = []
        self.engine = Engine(
            Scheduler(limits, speculation or Speculation(limits.max_drafts, adaptive=False), own),
            ModelRunner(
                *(model, self.layout, pool, limits, grammars or NO_GRAMMARS, chosen, probabilistic),
                encodings=self._encodings,
                adapters=own_adapters,
            ),
            lambda events: [self._events.put(event) for event in events] and None,
            self._failures.append,
            steps_in_flight,
            copies=copies,
        )
        self.engine.start()

    def refill(self) -> None:
        """Make all slots free again. No request may run."""
        self._slots = random.Random(1).sample(range(len(self.slots)), len(self.slots))

    def tables(self) -> list[list[int]]:
        """Return block tables for one request."""
        return [[self._slots.pop() for _ in range(group.blocks_for(MAX_TOKENS))] for group in self.layout.groups]

    def run_one(self, request: Request) -> None:
        """Run a request to its end, and stop the engine."""
        self.engine.add(request)
        while not isinstance(event := self._events.get(timeout=120), Sampled) or not (
            event.reason or request.only_first_token
        ):
            assert not self._failures
        self.engine.stop()

    def run(
        self, asked: Sequence[Asked], media: Sequence[Media] = (), adapters: Sequence[LoadedAdapter | None] = ()
    ) -> list[list[Token]]:
        """Run requests at the same time, each from its first token, and return their output tokens.

        An encoding comes only after the tokens before its span are computed, and goes when its span is computed.

        Args:
            media: of each request; empty if no request has any.
            adapters: of each request; empty if no request has any.
        """
        outputs: dict[Key, list[Token]] = {}
        own: dict[Key, list[list[int]]] = {}
        given: dict[Key, _Given] = {}
        for index, (prompt, sampling) in enumerate(asked):
            tables = self.tables()
            key = Key(str(index), 1, 1)
            own[key] = [[*table] for table in tables]
            outputs[key] = []
            spans = media[index] if media else ()
            adapter = adapters[index] if adapters else None
            digest = b"" if adapter is None else adapter.digest
            context = Context(prompt, media=[span for span, _ in spans], adapter=digest)
            self.engine.add(Request(key, context, len(prompt), sampling, self.layout, tables, adapter=adapter))
            given[key] = _Given(self, key, spans)
            given[key].go_on(0)
        left = set(outputs)
        while left:
            event = self._events.get(timeout=120)
            assert not self._failures
            if isinstance(event, Sampled):
                outputs[event.key].append(event.token)
                if event.reason is not None:
                    self.engine.remove(event.key)
            elif isinstance(event, Trimmed):
                behind = set(own[event.key][event.group][: event.first_kept_block]) - self.given_back
                self.slots[sorted(behind)] = FOREIGN
                self.given_back |= behind
            elif isinstance(event, Computed):
                given[event.key].go_on(event.first + event.length)
            elif isinstance(event, Removed):
                left.remove(event.key)
        return list(outputs.values())

    def states(self, wanted: Sequence[Request], others: Sequence[Request] = ()) -> list[torch.Tensor]:
        """Run requests for hidden states beside others, and return the states of each: [tokens, hidden]."""
        found: dict[Key, list[torch.Tensor]] = {request.key: [] for request in wanted}
        for request in (*wanted, *others):
            self.engine.add(request)
        left = {request.key for request in (*wanted, *others)}
        while left:
            event = self._events.get(timeout=120)
            assert not self._failures
            assert not isinstance(event, Failed)
            if isinstance(event, States):
                found[event.key].append(event.rows)
                if event.first + len(event.rows) == len(wanted[list(found).index(event.key)].token_ids):
                    self.engine.remove(event.key)
            elif isinstance(event, Sampled) and event.reason is not None:
                self.engine.remove(event.key)
            elif isinstance(event, Sealed):
                self.sealed.append(event)
            elif isinstance(event, Removed):
                left.remove(event.key)
        return [torch.cat(rows) for rows in found.values()]

    def provide(self, key: Key, index: int, encoding: torch.Tensor) -> list[int]:
        """Write an encoding to the arena, and tell a request. Return the encoding's slots."""
        slots = self._encodings.write(encoding, self._slots)
        self.engine.provide(key, index, slots)
        return slots


class Encodings:
    """Encodings in slots [slots, elements]. A block has as many rows as fit."""

    def __init__(self, model: Model, slots: torch.Tensor) -> None:
        self._slots = slots
        # A model that runs in transformers has no ModelConfig, and rows as large as hidden states.
        own = model._own_config.get_text_config() if isinstance(model, TransformersModel) else None
        size = getattr(own, "hidden_size", 1)
        self._hidden = model.config.encoding_size if isinstance(model.config, ModelConfig) else size
        self._room = slots.shape[1] // self._hidden

    def write(self, rows: torch.Tensor, free: list[int]) -> list[int]:
        """Write rows [length, hidden] to free slots, and return these."""
        slots = [free.pop() for _ in range(-(-len(rows) // self._room))]
        for slot, part in zip(slots, rows.split(self._room)):
            self._slots[slot, : part.numel()] = part.flatten()
        return slots

    def read(self, slots: Sequence[int], start: int, end: int) -> torch.Tensor:
        blocks = self._slots[list(slots), : self._room * self._hidden]
        rows = blocks.reshape(-1, self._hidden)[start:end]
        was_written = rows.isfinite() & (rows != FOREIGN)
        assert was_written.any(dim=1).all(), "an encoding is read that was not written, or was taken back"
        return rows


class _Given:
    """The encodings of one request, each of which it gets as late as possible."""

    def __init__(self, loop: Loop, key: Key, media: Media) -> None:
        self._loop = loop
        self._key = key
        self._media = media
        self._next = 0
        self._slots: list[int] = []

    def go_on(self, computed: int) -> None:
        """Take back the encodings of spans that are computed, and give the next one if its span comes next."""
        if self._next and computed >= self._media[self._next - 1][0].end:
            self._loop.slots[self._slots] = FOREIGN
        if self._next < len(self._media) and computed == self._media[self._next][0].start:
            self._slots = self._loop.provide(self._key, self._next, self._media[self._next][1])
            self._next += 1


def expected(model: Model, asked: Sequence[Asked], code: str = "") -> list[list[Token]]:
    """Return the output tokens of each request when it runs alone, one step at a time, without drafts.

    code: the code of keys and values, if they have one.
    """
    outputs = []
    for one in asked:
        loop = Loop(model, 1, "none", code=code)
        outputs += loop.run([one])
        loop.engine.stop()
    return outputs


def assert_same(found: list[list[Token]], wanted: list[list[Token]]) -> None:
    assert [[token.id for token in tokens] for tokens in found] == [[token.id for token in tokens] for tokens in wanted]
    for token, other in zip(itertools.chain(*found), itertools.chain(*wanted)):
        assert [entry.logprob for entry in token.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-3
        )
