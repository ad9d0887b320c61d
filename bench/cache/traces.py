"""Traces of requested blocks: recorded ones in Mooncake's format, and synthetic ones of several kinds."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

Trace = Sequence[Sequence[int]]
"""Requests in order of arrival. Each is the list of its context's blocks. Equal names mean equal contexts so far."""


def read_trace(path: Path) -> Trace:
    """Read a trace: a file of JSON lines with `hash_ids`.

    Raises:
        ValueError: the file is not in this format, or a request has a block twice.
    """
    try:
        requests = [json.loads(line)["hash_ids"] for line in path.read_text().splitlines() if line.strip()]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a trace in Mooncake's format: {error!r}") from error
    if any(len({*blocks}) != len(blocks) for blocks in requests):
        raise ValueError(f"{path} has a request that contains a block twice")
    return requests


class _Source:
    """A seeded random source that also gives new names to blocks."""

    def __init__(self, name: str, seed: int) -> None:
        self.draw = random.Random(f"{name}/{seed}")
        self._names = itertools.count()

    def blocks(self, least: int, most: int) -> list[int]:
        return [next(self._names) for _ in range(self.draw.randint(least, most))]

    def popular(self, count: int, exponent: float) -> Callable[[], int]:
        """Return a function that draws numbers below `count` by Zipf's law, with the ranks in random order."""
        order = self.draw.sample(range(count), count)
        weights = list(itertools.accumulate(1 / (rank + 1) ** exponent for rank in range(count)))
        return lambda: self.draw.choices(order, cum_weights=weights)[0]


Timed = Iterator[tuple[float, list[int]]]
"""Requests with their times in seconds."""


def _merged(parts: Iterator[Timed], requests: int) -> Trace:
    return [blocks for _, blocks in itertools.islice(heapq.merge(*parts, key=lambda one: one[0]), requests)]


def _talk(source: _Source, start: float, system: list[int], again: float, think: float) -> Timed:
    """Yield the requests of a conversation. After each, another one follows with probability `again`, after about
    `think` seconds."""
    context, at = list(system), start
    while True:
        context += source.blocks(1, 6)
        yield at, list(context)
        if source.draw.random() > again:
            return
        at += source.draw.lognormvariate(0, 1) * think
        context += source.blocks(0, 2)


def conversations(source: _Source) -> Trace:
    """Make chats of several turns with pauses between them. Each begins with one of 20 system prompts."""
    systems = [source.blocks(1, 8) for _ in range(20)]
    pick = source.popular(20, 1.0)
    starts = (index * 0.6 for index in range(2000))
    return _merged((_talk(source, at, systems[pick()], 0.7, 60) for at in starts), 4000)


def system_prompts(source: _Source) -> Trace:
    """Make single questions, each after one of 400 long system prompts, some of which are popular."""
    systems = [source.blocks(4, 30) for _ in range(400)]
    pick = source.popular(400, 0.9)
    return [systems[pick()] + source.blocks(1, 4) for _ in range(5000)]


def agents(source: _Source) -> Trace:
    """Make agents that call tools every few seconds, mixed with long documents that are read only once."""
    system = source.blocks(12, 12)

    def loops() -> Iterator[Timed]:
        for index in range(150):
            yield _talk(source, index * 12.0, system, 0.93, 4)

    def scans() -> Timed:
        for index in range(500):
            yield index * 3.6, source.blocks(30, 60)

    return _merged(itertools.chain(loops(), [scans()]), 3000)


def documents(source: _Source) -> Trace:
    """Make questions about documents, several in a row about the same one. Some documents always stay popular."""
    library = [source.blocks(10, 60) for _ in range(400)]
    pick = source.popular(400, 0.8)

    def visits() -> Iterator[Timed]:
        for index in range(1500):
            yield visit(index * 4.0, library[pick()])

    def visit(at: float, document: list[int]) -> Timed:
        for _ in range(source.draw.randint(1, 5)):
            yield at, document + source.blocks(1, 2)
            at += source.draw.expovariate(1 / 40)

    return _merged(visits(), 4000)


def evaluation(source: _Source) -> Trace:
    """Make a batch job that goes through the same 300 long prompts again and again, beside ordinary chats."""
    prompts = [source.blocks(15, 25) for _ in range(300)]

    def rounds() -> Timed:
        for index in range(3000):
            yield index * 0.5, prompts[index % len(prompts)] + source.blocks(1, 1)

    talks = (_talk(source, index * 3.0, [], 0.7, 40) for index in range(500))
    return _merged(itertools.chain([rounds()], talks), 4000)


def changing(source: _Source) -> Trace:
    """Make a load whose kind changes, as over a day: four of the other traces one after the other."""
    parts = [make(source) for make in (conversations, system_prompts, documents, agents)]
    return [blocks for part in parts for blocks in part[:1200]]


def tool_loops(source: _Source) -> Trace:
    """Make agents of several kinds that call tools quickly and then wait for their users, beside chats with pauses."""
    systems = [source.blocks(10, 40) for _ in range(6)]
    pick = source.popular(6, 0.7)

    def loop(at: float) -> Timed:
        context = list(systems[pick()])
        for _ in range(source.draw.randint(1, 4)):
            context += source.blocks(1, 3)
            for _ in range(source.draw.randint(1, 20)):
                yield at, list(context)
                context += source.blocks(1, 4)
                at += source.draw.expovariate(1 / 5)
            at += source.draw.lognormvariate(0, 1.5) * 200

    loops = (loop(index * 15.0) for index in range(300))
    talks = (_talk(source, index * 8.0, [], 0.6, 400) for index in range(700))
    return _merged(itertools.chain(loops, talks), 5000)


def retrieval(source: _Source) -> Trace:
    """Make questions with several passages that a search found. The first passage is often the same, the order not."""
    passages = [source.blocks(2, 4) for _ in range(60)]
    pick = source.popular(60, 1.1)
    system = source.blocks(3, 3)

    pairs: dict[tuple[int, int], list[int]] = {}

    def question() -> list[int]:
        first, second = pick(), pick()
        # A block's name includes what is before it, so the second passage has other blocks after another first one.
        after = pairs.setdefault((first, second), source.blocks(2, 4))
        return [*system, *passages[first], *after, *source.blocks(1, 3)]

    return [question() for _ in range(6000)]


def tenants(source: _Source) -> Trace:
    """Make the chats of 40 tenants with their own system prompts. One tenant also scans documents from time to time."""
    systems = [source.blocks(5, 25) for _ in range(40)]
    pick = source.popular(40, 1.2)

    def scans() -> Timed:
        for burst in range(12):
            for index in range(60):
                yield burst * 200.0 + index * 0.5, systems[0] + source.blocks(20, 40)

    talks = (
        _talk(source, index * 1.5, systems[pick()], source.draw.choice((0.2, 0.5, 0.8)), 45) for index in range(1600)
    )
    return _merged(itertools.chain(talks, [scans()]), 4000)


def with_owners(trace: Trace, owners: int, shares_prompts: bool = False, seed: int = 0) -> Trace:
    """Return a trace in which each conversation belongs to an owner, and owners have their blocks for themselves.

    A conversation begins after the last block that different blocks follow, which is where a system prompt ends.

    Args:
        owners: number of owners, to which the conversations are dealt at random. 0 gives all conversations with one
            first block, such as those with one system prompt, to one owner.
        shares_prompts: whether all owners share the blocks before a conversation, as with `--shared-prompts`.
    """
    draw = random.Random(f"owners/{seed}")
    followers: dict[int, set[int]] = {}
    for blocks in trace:
        for block, after in itertools.pairwise(blocks):
            followers.setdefault(block, set()).add(after)
    dealt: dict[int, int] = {}
    names: dict[tuple[int, int], int] = {}
    made = []
    for blocks in trace:
        forks = (place for place, block in enumerate(blocks, 1) if len(followers.get(block, ())) > 1)
        start = min(max(forks, default=0), len(blocks) - 1)
        owner = dealt.setdefault(blocks[start], draw.randrange(owners)) if owners else blocks[0]
        whose = [-1 if shares_prompts and place < start else owner for place in range(len(blocks))]
        made.append([names.setdefault(pair, len(names)) for pair in zip(whose, blocks)])
    return made


SYNTHETIC: dict[str, Callable[[_Source], Trace]] = {
    "conversations": conversations,
    "system-prompts": system_prompts,
    "agents": agents,
    "documents": documents,
    "evaluation": evaluation,
    "changing": changing,
    "tool-loops": tool_loops,
    "retrieval": retrieval,
    "tenants": tenants,
}


def make_trace(name: str, seed: int) -> Trace:
    """Return the synthetic trace `name`. Equal seeds make equal traces."""
    return SYNTHETIC[name](_Source(name, seed))
