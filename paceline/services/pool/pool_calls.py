"""The calls of a pool worker, and the rule by which their inputs share its steps. Pure.

A step computes inputs of several calls together, up to a number of tokens. The order is that of prompts
(`engine/prompt_order.py`): a call is like a prompt whose tokens are those of its inputs. So short calls go first,
long ones are not starved, and calls of the background wait for all others. An input is never divided, because an
encoder needs all of its tokens at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.pooling import PoolWish
from paceline.engine.prompt_order import Arrival, PromptOrder
from paceline.models.pooling.model import TextRow


@dataclass(slots=True, eq=False)
class PoolCall:
    """One call: all its inputs, and the indices of those inputs that no step has taken yet."""

    inputs: Sequence[TextRow]
    wish: PoolWish
    """What to compute. Only calls with the same wish share a step."""
    background: bool = False
    ttft_seconds: float | None = None
    prompt_arrival: Arrival | None = None
    is_alone: bool = False
    """Whether a step with inputs of this call has failed, so that it shares no further one."""
    ranges: deque[tuple[int, int]] = field(init=False)
    """Indices [first, end) of the inputs that no step computes or has computed."""
    left_len: int = field(init=False)
    """Number of tokens of these inputs."""

    def __post_init__(self) -> None:
        self.ranges = deque([(0, len(self.inputs))])
        self.left_len = self._tokens(0, len(self.inputs))

    def take(self, room: int, at_least_one: bool) -> PoolPiece | None:
        """Plan the next inputs that fit into `room` tokens, and return them; None if none fits.

        Args:
            at_least_one: whether to plan an input even if it has more tokens.
        """
        first, end = self.ranges[0]
        place, tokens = first, 0
        while place < end:
            length = len(self.inputs[place].token_ids)
            if tokens + length > room and not (at_least_one and not tokens):
                break
            place, tokens = place + 1, tokens + length
        if place == first:
            return None
        self.ranges.popleft()
        if place < end:
            self.ranges.appendleft((place, end))
        self.left_len -= tokens
        return PoolPiece(self, first, place, tokens)

    def put_back(self, piece: PoolPiece) -> None:
        """Plan the inputs of a piece again, in steps of this call alone."""
        self.ranges.appendleft((piece.first, piece.end))
        self.left_len += piece.tokens
        self.is_alone = True

    def _tokens(self, first: int, end: int) -> int:
        return sum(len(each.token_ids) for each in self.inputs[first:end])


class PoolPiece(NamedTuple):
    """Inputs [first, end) of a call that one step computes."""

    call: PoolCall
    first: int
    end: int
    tokens: int

    @property
    def inputs(self) -> Sequence[TextRow]:
        return self.call.inputs[self.first : self.end]


class StepPlanner:
    """Chooses the inputs of each step.

    Args:
        step_tokens: largest number of tokens of a step, unless it has a single input with more.
    """

    def __init__(self, step_tokens: int) -> None:
        self.step_tokens = step_tokens
        self._order = PromptOrder(step_tokens)

    def plan(self, calls: Iterable[PoolCall], tokens_per_second: float, now: float) -> list[PoolPiece]:
        """Return the pieces of the next step, which all have the same wish; [] if nothing is left to plan.

        Args:
            calls: the calls in the order of their arrival.
            tokens_per_second: measured speed; 0 if it is unknown.
            now: the present instant, in seconds of any clock.
        """
        pieces: list[PoolPiece] = []

        def take(call: PoolCall, room: int) -> int:
            if pieces and (call.is_alone or pieces[0].call.is_alone or call.wish != pieces[0].call.wish):
                return 0
            piece = call.take(room, at_least_one=not pieces)
            if piece is None:
                return 0
            pieces.append(piece)
            return piece.tokens

        self._order.share((call for call in calls if call.left_len), self.step_tokens, tokens_per_second, take, now)
        return pieces
