"""Runs of an engine over a few requests, with their figures. The benchmarks of the decode loop share this code."""

from __future__ import annotations

import itertools
import math
import platform
import queue
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor

from paceline.core.context import Context
from paceline.core.kv_layout import KVGroup, KVLayout
from paceline.core.types import Key, SamplingParams
from paceline.engine.engine import Engine, Runner
from paceline.engine.limits import Limits
from paceline.engine.loading import Loaded
from paceline.engine.request import Request
from paceline.engine.runner import layer_caches
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculation import Speculation
from paceline.engine.step import Event, Sampled
from paceline.kernels.batch import GroupTables
from paceline.kernels.caches import LayerCache, view_states
from paceline.kernels.reference import ReferenceKernels

MAX_LEN = 1024
GREEDY = SamplingParams()

_PATIENCE = 120
"""Seconds without an event after which a run fails. Kernels may be compiled in this time."""


@dataclass(frozen=True, slots=True)
class Run:
    tokens_per_second: float
    bubble: float
    """Share of the time in which the compute thread was idle although there was work."""
    accepted_length: float
    """Mean number of tokens that a request got from a step."""
    tokens: list[list[int]]
    cpu_ms: float
    """CPU milliseconds of all threads of this process together, per token."""
    resident_bytes: int
    """Resident memory of this process after the last token."""
    idle: float = math.nan
    """Share of a profiler's samples in which the compute thread computed nothing. NaN without a profiler."""


def run(
    loaded: Loaded,
    steps_in_flight: int,
    prompts: Sequence[list[int]],
    max_tokens: int,
    device: torch.device,
    watch: Callable[[Runner], Runner] = lambda runner: runner,
    max_len: int = MAX_LEN,
    adopted: bool = False,
    sampling: SamplingParams = GREEDY,
) -> Run:
    """Generate tokens for all prompts in one batch. The layout's item size chooses the dtype: 4 bytes fp32, 2 bf16.

    The measured time begins when every request has its first token, and ends at the last token of all.

    Args:
        watch: wraps the runner, in order to measure it.
        max_len: tokens of the longest context. Each request gets blocks for this many.
        adopted: treat the blocks of all prompts as filled, as on a decode worker, so that only decoding is measured.
            They hold random numbers, so the tokens have no meaning. All prompts must have the same length.
        sampling: parameters of each request, except `max_tokens`. Request i adds i to the seed.
    """
    blocks = [group.blocks_for(max_len) for group in loaded.layout.groups]
    pool = _pool(loaded.layout, len(prompts) * sum(blocks), device, adopted)
    if adopted:
        _end_states_at(loaded.layout, pool, len(prompts[0]) - 1)
    limits = Limits(512, max_len, len(prompts), loaded.max_drafts)
    adaptive = loaded.speculative is None or loaded.speculative.adaptive
    events: queue.SimpleQueue[list[Event] | BaseException] = queue.SimpleQueue()
    engine = Engine(
        Scheduler(limits, Speculation(loaded.max_drafts, adaptive)),
        watch(loaded.runner(pool, limits)),
        events.put,
        events.put,
        steps_in_flight,
    )
    engine.start()
    for request in _requests(loaded, prompts, blocks, replace(sampling, max_tokens=max_tokens), adopted):
        engine.add(request)
    tokens: list[list[int]] = [[] for _ in prompts]
    left, began, cpu_began, bubble_before, counted = len(prompts), 0.0, 0.0, 0.0, 0
    while left:
        happened = events.get(timeout=_PATIENCE)
        if isinstance(happened, BaseException):
            raise happened
        for event in happened:
            if isinstance(event, Sampled):
                if not began and all(tokens):
                    began, bubble_before = time.perf_counter(), engine.computing.bubble_seconds
                    cpu_began = time.process_time()
                    counted = sum(map(len, tokens))
                tokens[int(event.key.request_id)].append(event.token.id)
                left -= event.reason is not None
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    resident = psutil.Process().memory_info().rss
    engine.stop()
    given = sum(map(len, tokens)) - counted
    bubble = (engine.computing.bubble_seconds - bubble_before) / seconds
    accepted_length = engine.stats.sampled_tokens / engine.stats.steps / len(prompts)
    return Run(given / seconds, bubble, accepted_length, tokens, 1e3 * cpu_seconds / given, resident)


def _requests(
    loaded: Loaded, prompts: Sequence[list[int]], blocks: Sequence[int], sampling: SamplingParams, adopted: bool
) -> Iterator[Request]:
    """Yield one request per prompt, named by its index. `blocks` is its number of own blocks in each group."""
    slots = itertools.count()
    for index, prompt in enumerate(prompts):
        tables = [[next(slots) for _ in range(count)] for count in blocks]
        params = replace(sampling, seed=sampling.seed + index)
        filled = len(prompt) - 1 if adopted else 0
        yield Request(Key(str(index), 1, 1), Context(prompt), len(prompt), params, loaded.layout, tables, filled)


def _pool(layout: KVLayout, slots: int, device: torch.device, random: bool) -> Tensor:
    """Return the memory of `slots` blocks: zeros, or the same block of random numbers repeated."""
    dtype = torch.float32 if layout.itemsize == 4 else torch.bfloat16
    if not random:
        return torch.zeros(slots * layout.slot_bytes // layout.itemsize, dtype=dtype, device=device)
    piece = torch.randn(layout.slot_bytes // layout.itemsize, device=device).to(dtype)
    for group in layout.groups:
        if group.shape.code:
            _fill_codes(layout, group, piece)
    return piece.repeat(slots)


def _fill_codes(layout: KVLayout, group: KVGroup, block: Tensor) -> None:
    """Store random keys and values of 8 bits in a block of a group. Random bytes would have scales of any size."""
    tokens, shape = torch.arange(group.block_tokens), group.shape
    tables = GroupTables(len(tokens), 0, torch.zeros(1, 1).int(), torch.zeros_like(tokens), tokens)
    for cache in layer_caches(replace(layout, groups=(group,)), block):
        if isinstance(cache, LayerCache):
            keys, values = torch.randn(2, len(tokens), shape.kv_heads, shape.head_dim)
            ReferenceKernels().store_kv(keys, values, cache, tables)


def _end_states_at(layout: KVLayout, pool: Tensor, tokens: int) -> None:
    """Let the states in all blocks include the tokens before position `tokens`; see `RecurrentState`."""
    for group in layout.groups:
        if group.shape.state:
            for state in view_states(pool, layout.slot_bytes, len(group.shape.layers), group.shape.state):
                state.parts[1][:, 0, 0] = (tokens - 1) % group.block_tokens + 1


def machine(device: torch.device) -> dict[str, str]:
    """Return the device and the versions that figures belong to."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
    return {
        "device": name,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": sys.version.split()[0],
    }


def summary(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, float]]:
    """Return the medians of each way's runs, by figure. `same_requests` counts requests with the first way's tokens."""
    first = next(iter(runs.values()))
    base = statistics.median(run.tokens_per_second for run in first)
    figures: dict[str, dict[str, float]] = {}
    for name, way_runs in runs.items():
        speed = statistics.median(run.tokens_per_second for run in way_runs)
        figures[name] = {
            "tokens_per_second": speed,
            "ratio": speed / base,
            "bubble": statistics.median(run.bubble for run in way_runs),
            "idle": statistics.median(run.idle for run in way_runs),
            "tokens_a_step": statistics.median(run.accepted_length for run in way_runs),
            "same_requests": sum(a == b for run in way_runs for a, b in zip(run.tokens, first[0].tokens)),
            "requests": sum(len(run.tokens) for run in way_runs),
        }
    return figures


def print_header() -> None:
    columns = f"{'way':<32}{'tok/s':>9}{'ratio':>7}{'bubble':>9}{'idle':>8}{'tokens a step':>15}  same tokens"
    print(f"{'text':<8}{'batch':<7}{columns}")


def print_rows(text: str, batch: int, figures: Mapping[str, Mapping[str, float]]) -> None:
    for name, each in figures.items():
        print(
            f"{text:<8}{batch:<7}{name:<32}{each['tokens_per_second']:>9.1f}{each['ratio']:>7.2f}{each['bubble']:>9.2%}{each['idle']:>8.2%}"
            f"{each['tokens_a_step']:>15.2f}  {each['same_requests']:.0f} of {each['requests']:.0f}",
            flush=True,
        )
