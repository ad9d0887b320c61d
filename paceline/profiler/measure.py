"""The requests of a profile, in phases, and the measurements from them.

    prompts    single requests with prompts of every length that a step can have, and some that take several steps
    texts      single requests with texts, which the gateway has to tokenize
    batches    1, 2, 4, … requests at the same time, up to the number that workers run at once
    contexts   4 requests at the same time with long prompts
    arrivals   several short prompts and answers at the same time
    beside     prompts that arrive while 1, 4 and 12 requests are being answered

On a laptop all phases take about two minutes, and on a GPU a few seconds. On a slower machine, a phase leaves out
larger sizes after one that took SLOW_SECONDS.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from paceline.core.step_record import StepRecord
from paceline.profiler.stack import Facts, ProfiledAnswer, ProfiledStack

Steps = dict[str, list[StepRecord]]
"""Steps by the role of the workers that computed them."""
Traced = tuple[ProfiledAnswer, Mapping[str, Any]]
"""An answered request and the gateway's trace of it."""

REPEATS = 6
LONGEST_PROMPT = 4096
"""Longest prompt of a profile, in tokens."""
MOST_TOGETHER = 64
"""Largest number of requests that a profile sends at the same time."""
ANSWER_TOKENS = 48
SLOW_SECONDS = 20.0
"""If the requests of one size take longer than this, in seconds, larger sizes are left out."""
_SINGLE_TOKENS = 12
_ARRIVALS = 8
_ARRIVING_TOKENS = 48
"""Number of requests that arrive together (_ARRIVALS), and tokens of each prompt. They are so few and long that the
gateway holds none back and a prefill worker computes each."""
_BESIDE = (1, 4, 12)
_BESIDE_TOKENS = (128, 512)
_MOST_BESIDE = 24
"""Numbers of requests that are answered while prompts come, the alternating lengths of the prompts in tokens, and the
largest number of prompts.
"""
_WORDS = "the quick brown fox jumps over a lazy dog while seven wizards watch from their tower of old grey stone "


@dataclass(slots=True)
class Measured:
    """The measured steps and requests of one profile."""

    singles: list[Traced] = field(default_factory=list)
    """Requests that ran alone, with their traces."""
    texts: list[Traced] = field(default_factory=list)
    prompts: Steps = field(default_factory=lambda: {"prefill": [], "decode": []})
    """Steps of phases in which prompts were computed while nothing else ran."""
    decoding: Steps = field(default_factory=lambda: {"prefill": [], "decode": []})
    """Steps of phases in which a fixed number of requests were answered."""
    mixed: Steps = field(default_factory=lambda: {"prefill": [], "decode": []})
    """Steps that computed prompts and decoded sequences at the same time."""
    arrivals: list[tuple[list[Traced], Steps]] = field(default_factory=list)
    """Requests that came at the same time, and the steps that computed their prompts."""
    beside: Steps = field(default_factory=lambda: {"prefill": [], "decode": []})
    """Steps that computed prompts while a fixed number of other requests were answered."""
    crowded: list[Traced] = field(default_factory=list)
    """Requests whose prompts were computed while all of the other requests were being answered, with their traces."""


def measure(stack: ProfiledStack, facts: Facts, tell: Callable[[str], None]) -> Measured:
    """Send the requests of all phases and return the measurements. `tell` gets one line about each phase."""
    found = Measured()
    longest = min(facts.max_model_len - ANSWER_TOKENS, LONGEST_PROMPT, facts.host_tokens // 2)
    stack.ask(stack.prompt(min(64, longest)), 4)  # warms up caches and connections
    stack.new_steps()
    sizes = sorted(set(_prompt_sizes(facts.max_batched_tokens, longest)))
    tell(f"prompts of {', '.join(map(str, sizes))} tokens, one after another")
    for size in _until_slow(sizes, tell):
        for _ in range(REPEATS if size <= facts.max_batched_tokens else 2):
            found.singles.append(_single(stack, stack.prompt(size)))
    _add(found.prompts, found.decoding, stack.new_steps())
    tell("texts, which the gateway tokenizes")
    for repeats in (2, 20, 20, 20):
        words = f"{stack.prompt(1)} {_WORDS * repeats}"[:longest]
        found.texts.append(_single(stack, words))
    stack.new_steps()
    _batches(stack, facts, found, tell)
    _contexts(stack, facts, found, tell, longest)
    _arrivals(stack, facts, found, tell)
    _beside(stack, facts, found, tell)
    return found


def _prompt_sizes(budget: int, longest: int) -> Iterator[int]:
    """Yield lengths of prompts: all that one step can have, by doubling, and some that take several steps."""
    for power in itertools.count(4):
        if 2**power > min(budget, longest):
            break
        yield 2**power
        if power > 5 and 3 * 2 ** (power - 1) <= min(budget, longest):
            yield 3 * 2 ** (power - 1)
    for size in (budget, 2 * budget, 4 * budget, longest):
        yield max(1, min(size, longest))


def _until_slow(sizes: Iterable[int], tell: Callable[[str], None]) -> Iterator[int]:
    """Yield sizes until the caller has needed more than SLOW_SECONDS for one size."""
    for size in sizes:
        began = time.monotonic()
        yield size
        if time.monotonic() - began > SLOW_SECONDS:
            tell(f"this machine is slow: sizes above {size} are left out")
            return


def _single(stack: ProfiledStack, prompt: list[int] | str, tokens: int = _SINGLE_TOKENS) -> Traced:
    answer = stack.ask(prompt, tokens)
    return answer, stack.trace(answer)


def _add(prompts: Steps, decoding: Steps, steps: Steps) -> None:
    """Sort steps that were computed alone by their work. Steps with both kinds of work are left out."""
    for role, rows in steps.items():
        prompts[role] += [row for row in rows if row.prompt_tokens and not row.sequences]
        decoding[role] += [row for row in rows if row.sequences and not row.prompt_tokens]


def _batches(stack: ProfiledStack, facts: Facts, found: Measured, tell: Callable[[str], None]) -> None:
    """Answer more and more requests at the same time. A step counts if all of its requests have begun."""
    most = min(facts.max_seqs * facts.workers["decode"], MOST_TOGETHER, facts.host_tokens // 128)
    counts = sorted({min(2**power, most) for power in range(8)} | {min(3 * 2**power, most) for power in range(5)})
    tell(f"{', '.join(map(str, counts))} requests at the same time")
    for count in _until_slow(counts, tell):
        # The first ones must not have ended when the last one begins.
        tokens = min(ANSWER_TOKENS + count, facts.max_model_len - 32)
        stack.ask_together([stack.prompt(24) for _ in range(count)], tokens)
        _keep_full(found, stack.new_steps(), count // facts.workers["decode"])


def _contexts(stack: ProfiledStack, facts: Facts, found: Measured, tell: Callable[[str], None], longest: int) -> None:
    together = min(4, facts.max_seqs)
    length = min(longest, 2048, facts.host_tokens // (2 * together))
    tell(f"{together} requests with {length} tokens each at the same time")
    for part in (2, 1):
        stack.ask_together([stack.prompt(max(1, length // part)) for _ in range(together)], ANSWER_TOKENS)
        _keep_full(found, stack.new_steps(), together // facts.workers["decode"])


def _keep_full(found: Measured, steps: Steps, least: int) -> None:
    """Keep steps in which all requests were decoding, so that no prompt was computed at the same time."""
    for role, rows in steps.items():
        found.decoding[role] += [row for row in rows if row.sequences >= max(1, least) and not row.prompt_tokens]
        found.mixed[role] += [row for row in rows if row.sequences and row.prompt_tokens]


def _arrivals(stack: ProfiledStack, facts: Facts, found: Measured, tell: Callable[[str], None]) -> None:
    count = min(_ARRIVALS, facts.max_seqs)
    length = min(_ARRIVING_TOKENS, facts.max_batched_tokens, facts.max_model_len // 2)
    # If there is a handoff, it lies before the second token.
    tokens = 2 if facts.workers["prefill"] else 1
    tell(f"{count} requests with {length} tokens each at the same time")
    for _ in range(REPEATS):
        answers = stack.ask_together([stack.prompt(length) for _ in range(count)], tokens)
        found.arrivals.append(([(answer, stack.trace(answer)) for answer in answers], stack.new_steps()))


def _beside(stack: ProfiledStack, facts: Facts, found: Measured, tell: Callable[[str], None]) -> None:
    counts = sorted({count for count in _BESIDE if count < facts.max_seqs})
    longest = min(facts.max_batched_tokens, facts.max_model_len // 2)
    lengths = [min(length, longest) for length in _BESIDE_TOKENS]
    tell(
        f"prompts of {' and '.join(map(str, lengths))} tokens while {', '.join(map(str, counts))} requests are answered"
    )
    for count in _until_slow(counts, tell):
        with ThreadPoolExecutor(1) as pool:
            tokens = min(4 * ANSWER_TOKENS, facts.max_model_len - 32)
            running = pool.submit(stack.ask_together, [stack.prompt(24) for _ in range(count)], tokens)
            crowded: list[Traced] = []
            while not running.done() and len(crowded) < _MOST_BESIDE:
                crowded.append(_single(stack, stack.prompt(lengths[len(crowded) % 2]), 1))
            found.crowded += while_answered(crowded, running.result())
        for role, rows in stack.new_steps().items():
            found.beside[role] += rows
            found.mixed[role] += [row for row in rows if row.sequences and row.prompt_tokens]


def while_answered(crowded: Iterable[Traced], others: Iterable[ProfiledAnswer]) -> list[Traced]:
    """Return the requests that came, and got their first token, while all of `others` were between their first and last
    tokens.

    A prompt that came earlier also waited for the prompts of `others`, and a later prompt did not run beside all of
    them.
    """
    answered = [other for other in others if other.token_times]
    begin = max((other.sent + other.token_times[0] for other in answered), default=0.0)
    end = min((other.sent + other.token_times[-1] for other in answered), default=0.0)
    return [
        (answer, trace)
        for answer, trace in crowded
        if answer.token_times and begin <= answer.sent and answer.sent + answer.token_times[0] <= end
    ]
