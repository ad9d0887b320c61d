"""Workloads for a server: requests of exact lengths, in token ids, made from a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FIRST_ID = 1000
"""Smallest token id of prompts. Lower ids are special tokens and single bytes in most tokenizers."""


@dataclass(frozen=True, slots=True)
class Request:
    prompt: tuple[int, ...]
    """Token ids."""
    max_tokens: int
    group: str = "all"
    """Name of the group. Each group has figures of its own."""
    at: float = 0.0
    """Earliest time to send the request, in seconds after the start."""
    stream: str = ""
    """Name of a stream, whose requests are sent one after another; "" if it belongs to none."""
    temperature: float = 0.0
    top_p: float = 1.0
    chat: dict[str, Any] | None = None
    """Fields of a chat, which is sent instead of the prompt."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: tuple[Request, ...]
    concurrency: int
    """Largest number of requests that run at the same time. The next one is sent when one ends."""


Prompt = Callable[[int], tuple[int, ...]]


def make_workload(name: str, seed: int, vocab: int = 32_000) -> Workload:
    """Return the workload `name` of WORKLOADS.

    Args:
        seed: equal seeds make equal prompts. Use a new one for each run, or the server's prefix cache has the prompts.
        vocab: all token ids are below this.
    """
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}; choose from {', '.join(WORKLOADS)}")
    if vocab <= FIRST_ID:
        raise ValueError(f"the vocabulary must be larger than {FIRST_ID}")
    source = random.Random(f"{name}/{seed}")

    def prompt(tokens: int) -> tuple[int, ...]:
        return tuple(source.choices(range(FIRST_ID, vocab), k=tokens))

    return WORKLOADS[name](name, prompt)


def _uniform(count: int, concurrency: int, tokens_in: int, tokens_out: int) -> Callable[[str, Prompt], Workload]:
    def make(name: str, prompt: Prompt) -> Workload:
        return Workload(name, tuple(Request(prompt(tokens_in), tokens_out) for _ in range(count)), concurrency)

    return make


def _sampled(name: str, prompt: Prompt) -> Workload:
    """Eight streams at a time with sampled tokens, as in chats."""
    requests = tuple(Request(prompt(128), 128, temperature=0.8, top_p=0.95) for _ in range(16))
    return Workload(name, requests, concurrency=8)


def _interference(name: str, prompt: Prompt) -> Workload:
    """Four steady streams, and a long prompt every 2.5 seconds. It shows how prompts delay the streams."""
    steady = [Request(prompt(64), 192, "steady") for _ in range(4)]
    arriving = [Request(prompt(1024), 8, "arriving", at=0.5 + 2.5 * number) for number in range(4)]
    return Workload(name, (*steady, *arriving), concurrency=len(steady) + len(arriving))


def _short_prompts(long: int) -> Callable[[str, Prompt], Workload]:
    """Prompts of 16 to 64 tokens, beside three steady streams and `long` long prompts."""

    def make(name: str, prompt: Prompt) -> Workload:
        steady = [Request(prompt(300), 160, "steady") for _ in range(3)]
        lengths = itertools.islice(itertools.cycle((16, 24, 32, 48, 64)), 20)
        short = [Request(prompt(tokens), 128, "short", at=0.8 + 0.2 * i) for i, tokens in enumerate(lengths)]
        arriving = [Request(prompt(1500), 4, "long", at=0.7 + 0.9 * number) for number in range(long)]
        return Workload(name, (*steady, *short, *arriving), concurrency=64)

    return make


def _mixed_lengths(name: str, prompt: Prompt) -> Workload:
    """Three steady streams of requests with short prompts, and four long prompts at once every eight seconds."""
    short = [Request(prompt(200), 64, "short", stream=f"stream {number % 3}") for number in range(36)]
    long = [Request(prompt(1600), 32, "long", at=2.0 + 8.0 * burst) for burst in range(3) for _ in range(4)]
    return Workload(name, (*short, *long), concurrency=64)


def _burst_of_32(name: str, prompt: Prompt) -> Workload:
    """32 prompts at once, from 64 to 1,600 tokens."""
    lengths = {"short": (64, 128, 200, 256), "middle": (400, 600), "long": (1000, 1600)}
    requests = [Request(prompt(tokens), 16, group) for group, length in lengths.items() for tokens in 4 * length]
    return Workload(name, tuple(requests[11 * number % 32] for number in range(32)), concurrency=32)


def _shared_prefix(name: str, prompt: Prompt) -> Workload:
    """A long system prompt that all requests share. `first` has to compute it, `later` should not."""
    system = prompt(768)
    first = Request(system + prompt(64), 32, "first")
    later = [Request(system + prompt(64), 32, "later") for _ in range(12)]
    return Workload(name, (first, *later), concurrency=1)


def _copy_heavy(name: str, prompt: Prompt) -> Workload:
    """Prompts that repeat a passage and end within its fourth copy. Models go on copying, so that ngram drafts fit."""
    passages = [prompt(64) for _ in range(4)]
    return Workload(name, tuple(Request((passage * 4)[:220], 192) for passage in passages), concurrency=1)


WORKLOADS: dict[str, Callable[[str, Prompt], Workload]] = {
    "one": _uniform(count=4, concurrency=1, tokens_in=128, tokens_out=128),
    "eight": _uniform(count=16, concurrency=8, tokens_in=128, tokens_out=128),
    "sampled": _sampled,
    "prompt-heavy": _uniform(count=16, concurrency=16, tokens_in=512, tokens_out=64),
    "long-prompt": _uniform(count=4, concurrency=1, tokens_in=1600, tokens_out=8),
    "interference": _interference,
    "short-prompts": _short_prompts(long=0),
    "short-and-long": _short_prompts(long=4),
    "mixed-lengths": _mixed_lengths,
    "burst-32": _burst_of_32,
    "shared-prefix": _shared_prefix,
    "copy-heavy": _copy_heavy,
}
