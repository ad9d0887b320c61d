"""Inputs of pooling that go to one worker together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.core.media import MediaInput, MediaSpan
from paceline.core.pooling import PoolWish
from paceline.proto import common_pb2
from paceline.services.common.pool_wire import wish_to_pb


@dataclass(frozen=True, slots=True)
class PoolInput:
    """One input as a worker computes it."""

    token_ids: Sequence[int]
    second_start: int = 0
    """Number of tokens before the second text of a pair; 0 if the input is a single text."""
    prompt_tokens: int = 0
    """Number of tokens at the front that are an instruction."""
    media: tuple[MediaSpan, ...] = ()
    """Runs of placeholder tokens, in order. An input with media is a bundle of its own."""
    encoder_inputs: tuple[MediaInput, ...] = ()
    """The encoder's input for each of `media`."""


@dataclass(frozen=True, slots=True)
class PoolBundle:
    """Inputs that go to one worker in one call, and what to compute from them."""

    wish: PoolWish
    inputs: Sequence[PoolInput]

    def work(self, indices: Iterable[int]) -> common_pb2.PoolWork:
        """Return the message for the inputs with these indices, in this order."""
        work = wish_to_pb(self.wish)
        for index in indices:
            own = self.inputs[index]
            work.inputs.add(token_ids=own.token_ids, second_start=own.second_start, prompt_tokens=own.prompt_tokens)
        return work
