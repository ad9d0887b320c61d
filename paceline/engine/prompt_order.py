"""The rule by which the prompts of one worker share its steps. Pure: the clock is the number of prompt tokens that were
planned so far, and instants in seconds are arguments.

The prompt with the fewest tokens left should go first, because this gives the least mean time to first token. But short
prompts must not starve long ones. So each prompt has a due instant on the clock, and the prompt that is due first goes
first:

    due = clock at its arrival + patience            patience = min(AGING * tokens left, slack)

The slack is what the prompt's objective leaves: the tokens that the worker can compute until the objective's deadline,
minus the prompt's own tokens. Among equal prompts the order is that of arrival. A prompt becomes more urgent while it
is computed. So two equal prompts do not take turns, which would delay one of them and help neither. A prompt that is
overtaken keeps its KV, so changing to another prompt costs nothing but the row and the blocks that it holds.

A long prompt that goes first only because it has waited would delay short prompts by all its steps. So it takes turns
with prompts that have fewer tokens left and fit into one step: each side gets half of the tokens. Altogether, later
prompts delay a prompt by at most AGING times its own tokens, and then at most double its remaining time.

A step under way cannot be interrupted, and a first token is known only at the step's end. So a step that has the last
tokens of a prompt gets more tokens only until it is half full. A step with a part of a longer prompt also gets at most
half of its tokens if a more urgent prompt will probably arrive during the step, because such a prompt arrived lately.
Arrivals of the background do not count, because they precede no client's prompt, and no client waits for their first
tokens. A token costs somewhat more in half a step than in a whole one. Even smaller steps would read the weights too
often.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

AGING = 4
"""Number of tokens of later prompts that may be computed before a prompt, for each token that the prompt has left."""

RECENT_STEPS = 8
"""An arrival is recent until the worker has planned this number of whole steps of prompt tokens, or has had the time to
compute them. After a recent arrival, a prompt like it will probably come soon.
"""

_REMEMBERED = 32
"""Largest number of arrivals that are remembered. Arrivals of background requests are not remembered."""

LONG_SECONDS = 0.02
"""If a step takes at least this many seconds, the next step is planned only after its end. Planning takes about a
millisecond, and a prompt that arrives during the step would otherwise have to wait for both steps.
"""


class Arrival(NamedTuple):
    """The arrival of a prompt."""

    number: int
    """Number of prompts that arrived before this one."""
    clock: int
    """Instant of the arrival on the clock: the number of prompt tokens that were planned before it."""
    tokens: int = 0
    """Number of the prompt's tokens that were not cached when it arrived."""
    slack: float = math.inf
    """Number of other prompts' tokens that may be computed first so that this prompt still meets its objective;
    infinite without an objective.
    """
    at: float = 0.0
    """Instant of the arrival, in seconds on the clock of `PromptOrder.share`."""

    def due(self, left: int) -> float:
        """Return the due instant, on the clock of planned tokens, of a prompt with `left` unplanned tokens. Prompts
        that arrive later go after it.
        """
        return self.clock + min(float(AGING * left), self.slack)


class OrderedPrompt(Protocol):
    """A prompt with tokens that no step computes yet."""

    prompt_arrival: Arrival | None
    """Arrival of the prompt; None until a step could include the prompt."""

    @property
    def background(self) -> bool:
        """Whether no client waits for the prompt, so that it comes after all other prompts."""

    @property
    def left_len(self) -> int:
        """Number of the prompt's tokens that no planned step computes."""

    @property
    def ttft_seconds(self) -> float | None:
        """Limit for the time to first token, in seconds from arrival; None without an objective. 0 if the client has
        tokens already and waits for the next one.
        """


P = TypeVar("P", bound=OrderedPrompt)


class PromptOrder:
    """The clock of a worker's prompts, and the latest arrivals.

    Args:
        step_tokens: tokens of a whole step.
    """

    def __init__(self, step_tokens: int) -> None:
        self._room = step_tokens
        self._recent = RECENT_STEPS * step_tokens
        self._clock = self._arrivals = 0
        self._leader = -1
        """`Arrival.number` of the most urgent prompt; -1 if there is none."""
        self._lead = 0
        """Tokens that the most urgent prompt got since it became the most urgent, minus tokens that other prompts got;
        at most half a step.
        """
        self._newest: deque[Arrival] = deque(maxlen=_REMEMBERED)

    def share(
        self,
        prompts: Iterable[P],
        room: int,
        tokens_per_second: float,
        take: Callable[[P, int], int],
        now: float = 0.0,
    ) -> None:
        """Share the prompt tokens of one step among prompts, by calls of `take`.

        Args:
            prompts: prompts that this step may include, in the order of their arrival.
            room: largest number of prompt tokens in this step.
            tokens_per_second: measured speed of prefill; 0 if unknown, which ignores ages and new objectives.
            take: plans up to about this many tokens of a prompt; returns how many, 0 if the prompt cannot continue now.
            now: the present instant, in seconds of any clock.
        """
        waiting = list(prompts)
        for prompt in waiting:
            if prompt.prompt_arrival is None:
                prompt.prompt_arrival = self._arrive(prompt, tokens_per_second, now)
        order = sorted(waiting, key=_urgency)
        first = self._leader_of(order)
        if self._lead > 0:
            order = self._let_short_ones_go(order)
        half, used, completes = (room + 1) // 2, 0, False
        for prompt in order:
            if used >= half:
                break
            left = prompt.left_len
            fits = used == 0 and left <= room  # cutting the prompt would only delay its first token
            limit = half if not fits and (completes or self._expects_others(prompt, tokens_per_second, now)) else room
            taken = take(prompt, limit - used)
            used += taken
            completes = completes or taken >= left
            self._lead += taken if prompt is first else -taken
        self._lead = max(-self._room, min(self._lead, half))
        self._clock += used

    def _leader_of(self, order: Sequence[P]) -> P | None:
        """Return the most urgent prompt. If another one was the most urgent before, it has no lead yet."""
        first = order[0] if order else None
        number = -1 if first is None or first.prompt_arrival is None else first.prompt_arrival.number
        if number != self._leader:
            self._leader, self._lead = number, 0
        return first

    def _let_short_ones_go(self, order: Sequence[P]) -> list[P]:
        """Return the order of a step in which short prompts go before the first one, because it is their turn."""
        first = order[0]
        short = [prompt for prompt in order[1:] if not prompt.background and self._takes_turns(prompt.left_len, first)]
        short.sort(key=lambda prompt: prompt.left_len)
        return [*short, *(prompt for prompt in order if prompt not in short)]

    def _takes_turns(self, left: int, waited: OrderedPrompt) -> bool:
        """Return whether a prompt with `left` tokens takes turns with one that is due before it."""
        arrival = waited.prompt_arrival
        assert arrival is not None
        is_late = not waited.background and AGING * waited.left_len <= arrival.slack
        return is_late and left <= self._room and left < waited.left_len

    def _arrive(self, prompt: OrderedPrompt, tokens_per_second: float, now: float) -> Arrival:
        arrival, wanted = Arrival(self._arrivals, self._clock, prompt.left_len, at=now), prompt.ttft_seconds
        if wanted is not None and (tokens_per_second > 0 or wanted == 0):
            arrival = arrival._replace(slack=max(0.0, wanted * tokens_per_second - prompt.left_len))
        self._arrivals += 1
        if not prompt.background:
            self._newest.append(arrival)
        return arrival

    def _expects_others(self, prompt: OrderedPrompt, tokens_per_second: float, now: float) -> bool:
        """Return whether a prompt arrived lately that would go before this one, or in turn, if it arrived now."""
        arrival = prompt.prompt_arrival
        assert arrival is not None
        due = math.inf if prompt.background else arrival.due(prompt.left_len)
        alike = (
            other._replace(clock=self._clock)
            for other in self._newest
            if other is not arrival
            and self._clock - other.clock < self._recent
            and (now - other.at) * tokens_per_second < self._recent
        )
        return any(other.due(other.tokens) < due or self._takes_turns(other.tokens, prompt) for other in alike)


def is_long(tokens: int, tokens_per_second: float) -> bool:
    """Return whether a step with `tokens` prompt tokens is so long that the next step is planned only after its end.

    Args:
        tokens_per_second: measured speed of prefill; 0 if it is unknown.
    """
    return tokens > LONG_SECONDS * tokens_per_second > 0


def piece_of(left: int, budget: int) -> int:
    """Return how many of the `left` tokens of a prompt to compute now, at most `budget`.

    A prompt that needs two steps is cut in the middle, because a small last piece would share its step with another
    prompt.
    """
    return (left + 1) // 2 if budget < left < 2 * budget else min(left, budget)


def _urgency(prompt: OrderedPrompt) -> tuple[bool, float, int]:
    arrival = prompt.prompt_arrival
    assert arrival is not None
    return prompt.background, arrival.due(prompt.left_len), arrival.number
