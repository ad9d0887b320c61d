"""The load of a simulation: requests in the order of their arrival.

A trace has no text. It has the names of the blocks of each prompt, so that two requests share a cached prefix in the
simulation exactly if they shared one in reality.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class TraceRequest(NamedTuple):
    """One request of a trace: its arrival, its lengths, and the names of its blocks."""

    arrival: float
    """Seconds since the beginning of the trace. Requests are in ascending order of this time."""
    prompt_tokens: int
    """Length of the prompt in tokens, at least 1."""
    answer_tokens: int
    """Length of the answer in tokens, at least 1."""
    blocks: Sequence[int] = ()
    """Names of the context's full blocks, `LoadTrace.block_tokens` tokens each, in order; each is a number of 64 bits.
    A name stands for its block and all blocks before it. Blocks of the answer may follow those of the prompt if they
    are known. A block without a name is shared with no other request."""
    group: str = ""
    """Class of the request, for which objectives may be given."""
    session: str = ""
    """Id of the request's conversation; "" if unknown. The simulator does not need it."""
    owner: str = ""
    """Name of the API key of the request. If requests wait, the keys share the free places."""
    priority: int = 0
    """Priority of the request; lower is more urgent."""
    adapter: int = 0
    """Name of the request's adapter, a number of 64 bits; 0 for the model alone. Names of blocks depend on it."""


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """A load. It can be iterated as often as its `requests`: once if they are a generator."""

    block_tokens: int
    """Tokens of one named block; a multiple of 16."""
    requests: Iterable[TraceRequest]
    """The requests in the order of arrival. A generator keeps a long trace out of the memory."""

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)
