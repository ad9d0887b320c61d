"""The runner gives the same tokens and logprobs as `transformers`, with any chunks, batches and slots."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.core.context import Context
from paceline.core.errors import ModelError, PacelineError
from paceline.core.kv_layout import NO_SLOT, make_layout
from paceline.core.types import Key, SamplingParams, Token
from paceline.engine.drafter import NewestStates
from paceline.engine.limits import Limits
from paceline.engine.request import Request
from paceline.engine.rows import Rows
from paceline.engine.runner import ModelRunner
from paceline.engine.sampler import Draft
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculation import Speculation
from paceline.engine.step import Chunk, Event, Failed, RowAssigned, Sampled, Step
from paceline.kernels import select_kernels
from paceline.kernels.interface import ForwardInputs
from paceline.models.base import Model
from paceline.models.loader import load_model
from tests.engine.loops import NO_GRAMMARS

CPU = torch.device("cpu")
MAX_TOKENS = 448


class Bench:
    """A runner over a pool of NaN, and requests with blocks in shuffled slots.

    Blocks that a window has left are removed from the table and filled with NaN, as when the engine gives them back.
    """

    def __init__(self, model: Model, seed: int, requests: int, dtype: torch.dtype = torch.float32) -> None:
        self.rng = random.Random(seed)
        self.layout = make_layout(model.group_shapes, dtype.itemsize, "test")
        slots = requests * self.layout.slots_for(MAX_TOKENS)
        self.pool = torch.full((slots * self.layout.slot_bytes // dtype.itemsize,), float("nan"), dtype=dtype)
        self._model = model
        self._count = requests
        self._rows: dict[Key, int] = {}
        self.change_runner()
        self.tokens: dict[str, list[Token]] = {}
        self.scores: dict[str, list[Token]] = {}
        self.failures: dict[str, PacelineError] = {}
        self._slots = self.rng.sample(range(slots), slots)

    def change_runner(self) -> None:
        """Replace the runner by a new one, which knows nothing of the requests except the content of their blocks."""
        limits = Limits(MAX_TOKENS * self._count, MAX_TOKENS, self._count)
        self.runner = ModelRunner(self._model, self.layout, self.pool, limits, NO_GRAMMARS)
        self._rows.clear()

    def request(self, name: str, prompt: Sequence[int], **sampling: object) -> Request:
        tables = [[self._slots.pop() for _ in range(group.blocks_for(MAX_TOKENS))] for group in self.layout.groups]
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        self.tokens[name], self.scores[name] = [], []
        return Request(Key(name, 1, 1), Context(prompt), len(prompt), params, self.layout, tables)

    def run(self, requests: Sequence[Request], longest_chunk: int) -> None:
        """Run steps with random requests and random chunks until all requests have their tokens."""
        while unfinished := [request for request in requests if request.output_len < request.sampling.max_tokens]:
            chosen = self.rng.sample(unfinished, self.rng.randint(1, len(unfinished)))
            lefts = [len(request.token_ids) - request.computed_len for request in chosen]
            self.step([(one, min(left, self.rng.randint(1, longest_chunk))) for one, left in zip(chosen, lefts)])

    def step(self, pieces: Sequence[tuple[Request, int]]) -> None:
        """Compute the next tokens of each request. A piece is a request and its number of tokens."""
        updates, chunks = [], []
        for request, length in pieces:
            if request.key not in self._rows:
                self._rows[request.key] = len(self._rows)
                updates.append(self._joined(request))
            start = request.computed_len
            samples = start + length == len(request.token_ids)
            # If the newest token is alone in its chunk, either the host gives it or the device already has it.
            follows = samples and length == 1 and self.rng.random() < 0.5
            chunks.append(self._chunk(request, start, length, follows, samples))
        results = self.runner.execute(Step(tuple(chunks), tuple(updates))).chunks
        for (request, _), chunk, result in zip(pieces, chunks, results, strict=True):
            name = chunk.key.request_id
            if result.failure is not None:
                self.failures[name] = result.failure
                continue
            assert len(result.tokens) == chunk.samples
            request.computed_len = chunk.end
            self.scores[name] += result.scores
            self.tokens[name] += result.tokens
            request.token_ids.extend(token.id for token in result.tokens)
            self._trim(request)

    def _chunk(self, request: Request, start: int, length: int, follows: bool, samples: bool) -> Chunk:
        reports = request.sampling.prompt_logprobs is not None
        scored = max(0, min(start + length, request.prompt_len - 1) - start) if reports else 0
        return Chunk(request.key, self._rows[request.key], start, length, follows, samples, not follows, scored=scored)

    def _joined(self, request: Request) -> RowAssigned:
        return RowAssigned(
            self._rows[request.key],
            [*request.token_ids],
            request.prompt_len,
            request.computed_len,
            request.sampling,
            request.limit(MAX_TOKENS),
            [[*table] for table in request.tables],
            request.capacity,
        )

    def _trim(self, request: Request) -> None:
        for index in range(len(request.tables)):
            before = [*request.tables[index]]
            for slot in before[: request.trim_behind_window(index)]:
                if slot != NO_SLOT:
                    self.pool.view(-1, self.layout.slot_bytes // 4)[slot] = float("nan")


@pytest.fixture(params=["llama", "gemma3", "granite_hybrid", "deepseek_v2", "gemma4"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Model, transformers.PreTrainedModel]:
    """A tiny model, loaded by Paceline, and the reference that saved it."""
    reference = request.getfixturevalue(f"save_{request.param}")()
    return load_model(tmp_path, torch.float32, select_kernels(CPU), CPU), reference


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, 100) for _ in range(length)] for length in lengths]


def generated(reference: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    output = reference.generate(
        ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return list(output[0, len(prompt) :].tolist())


def logprobs(reference: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return logprobs, fp32 [tokens, vocab]. Row i is about token i + 1."""
    with torch.no_grad():
        return torch.log_softmax(reference(torch.tensor([tokens])).logits[0].float(), dim=-1)


@pytest.mark.parametrize(("seed", "longest_chunk"), [(0, 7), (1, 48), (2, MAX_TOKENS)])
def test_greedy_tokens_are_those_of_transformers(
    pair: tuple[Model, transformers.PreTrainedModel], seed: int, longest_chunk: int
) -> None:
    model, reference = pair
    cases = prompts(1, 16, 17, 64, 95)
    bench = Bench(model, seed, len(cases))
    requests = [bench.request(str(index), prompt, max_tokens=20) for index, prompt in enumerate(cases)]
    bench.run(requests, longest_chunk)
    for index, prompt in enumerate(cases):
        assert [token.id for token in bench.tokens[str(index)]] == generated(reference, prompt, 20)


@pytest.mark.parametrize("whole", [False, True], ids=["in chunks", "whole"])
def test_reports_are_of_the_reference_s_logits(pair: tuple[Model, transformers.PreTrainedModel], whole: bool) -> None:
    model, reference = pair
    # The first prompt comes in one chunk and has more rows than are scored at a time.
    cases = prompts(400, 33)
    bench = Bench(model, 3, len(cases))
    params = {"max_tokens": 6, "logprobs": 3, "prompt_logprobs": 2}
    requests = [bench.request(str(index), prompt, **params) for index, prompt in enumerate(cases)]
    if whole:
        bench.step([(request, request.prompt_len) for request in requests])
    bench.run(requests, longest_chunk=29)
    for index, prompt in enumerate(cases):
        rows = logprobs(reference, requests[index].token_ids)
        scores, tokens = bench.scores[str(index)], bench.tokens[str(index)]
        reports = [*scores, *tokens]
        counts = [2] * len(scores) + [3] * len(tokens)
        assert len(scores) == len(prompt) - 1
        assert [token.id for token in reports] == requests[index].token_ids[1:]
        for row, token, most_likely in zip(rows, reports, counts):
            assert len(token.logprobs) == 1 + most_likely
            assert token.logprobs[0].token_id == token.id
            for entry in token.logprobs:
                assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-4)
            assert [entry.logprob for entry in token.logprobs[1:]] == pytest.approx(
                row.topk(most_likely).values.tolist(), abs=2e-4
            )


def test_a_request_goes_on_in_blocks_that_another_runner_has_filled(
    pair: tuple[Model, transformers.PreTrainedModel],
) -> None:
    model, reference = pair
    (prompt,) = prompts(90)
    bench = Bench(model, 4, 1)
    request = bench.request("a", prompt, max_tokens=12)
    bench.step([(request, 90)])
    bench.change_runner()
    bench.run([request], 16)
    assert [token.id for token in bench.tokens["a"]] == generated(reference, prompt, 12)


def test_steps_write_to_no_block_but_their_own(pair: tuple[Model, transformers.PreTrainedModel]) -> None:
    model, _ = pair
    bench = Bench(model, 5, 3)
    first, second, _ = (bench.request(name, prompt, max_tokens=4) for name, prompt in zip("abc", prompts(40, 50, 60)))
    bench.step([(first, 40)])
    slots = bench.pool.view(-1, bench.layout.slot_bytes // 4)
    before = slots.clone()
    bench.step([(second, 50)])
    # Compare bits, because NaN is not equal to itself.
    changed = (slots.view(torch.int32) != before.view(torch.int32)).any(dim=1).nonzero().flatten().tolist()
    own = {slot for table, group in zip(second.tables, bench.layout.groups) for slot in table[: group.blocks_for(50)]}
    assert changed
    assert set(changed) <= own


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_row_that_has_ended_gives_nothing_beside_a_prompt(backend: str, save_llama: Any, tmp_path: Path) -> None:
    save_llama()
    bench = Bench(load_model(tmp_path, torch.bfloat16, select_kernels(CPU, backend), CPU), 0, 2, torch.bfloat16)
    ended, other = bench.request("ended", [5, 6, 7], max_tokens=1), bench.request("other", [8, 9, 10], max_tokens=1)
    bench.step([(ended, 3), (other, 1)])
    late = Chunk(ended.key, 0, 3, 1, follows=True, samples=True, prefills=False)
    prompt = Chunk(other.key, 1, 1, 1, follows=False, samples=False, prefills=True)
    results = bench.runner.execute(Step((late, prompt))).chunks
    assert [result.tokens for result in results] == [[], []]


class Overflowing:
    """A model in which one number of the hidden state after a token is NaN. All its states must be wanted, or the last
    one of each chunk."""

    def __init__(self, model: Model, token: int) -> None:
        self._model = model
        self._token = token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, inputs: ForwardInputs, *options: Any) -> torch.Tensor:
        hidden, token_ids = self._model.forward(inputs, *options), inputs.token_ids
        assert inputs.taps is not None
        assert inputs.taps.broken is not None
        inputs.taps.broken |= token_ids == self._token
        ends = [end - 1 for end in inputs.batch.query_start[1:]]
        hidden[(token_ids if len(hidden) == len(token_ids) else token_ids[ends]) == self._token, 3] = float("nan")
        return hidden


def test_a_request_whose_numbers_are_nan_fails_alone(tmp_path: Path, save_llama: Any) -> None:
    reference = save_llama()
    model: Any = Overflowing(load_model(tmp_path, torch.float32, select_kernels(CPU), CPU), 7)
    bench = Bench(model, 6, 3)
    asked = [
        bench.request(name, [4, 5, last], max_tokens=3, temperature=heat)
        for name, last, heat in (("fine", 6, 0.0), ("broken", 7, 0.0), ("drawn", 7, 1.0))
    ]
    bench.step([(request, 3) for request in asked])
    assert [token.id for token in bench.tokens["fine"]] == generated(reference, [4, 5, 6], 1)
    assert (bench.tokens["broken"], bench.tokens["drawn"]) == ([], [])
    assert set(bench.failures) == {"broken", "drawn"}
    assert all(isinstance(own, ModelError) and "NaN" in str(own) for own in bench.failures.values())


class Knowing:
    """A drafter that drafts one token, which it was told."""

    fills_kv, taps = False, ()

    def __init__(self, token: int) -> None:
        self._token = token

    def observe(self, *args: object) -> None:
        """Learn nothing."""

    def draft(self, rows: Rows, wanted: Mapping[int, int], newest: NewestStates) -> int:
        for row in wanted:
            rows.draft(row, [Draft(self._token)])
        return len(wanted)


def test_nan_after_an_accepted_draft_gives_no_token(tmp_path: Path, save_llama: Any) -> None:
    tokens = generated(save_llama(), [4, 5, 6], 2)
    model: Any = Overflowing(load_model(tmp_path, torch.float32, select_kernels(CPU), CPU), tokens[1])
    bench, limits = Bench(model, 7, 1), Limits(MAX_TOKENS, MAX_TOKENS, 1, 1)
    runner = ModelRunner(model, bench.layout, bench.pool, limits, NO_GRAMMARS, Knowing(tokens[1]))
    scheduler = Scheduler(limits, Speculation(1, adaptive=False))
    scheduler.add(bench.request("a", [4, 5, 6], max_tokens=9))
    happened: list[Event] = []
    while not any(isinstance(event, Failed) for event in happened):
        step = scheduler.plan()
        assert step is not None
        scheduler.apply(step, runner.execute(step))
        happened += scheduler.take_events()
    assert [event.token.id for event in happened if isinstance(event, Sampled)] == tokens
