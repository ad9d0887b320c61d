"""A scheduler above toy memories that remember what was computed. All other events come at random times."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.context import Context
from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.core.types import Key, SamplingParams, Token
from paceline.engine.compute_pool import CopyBatch
from paceline.engine.device_pool import DevicePool
from paceline.engine.limits import Limits
from paceline.engine.pool_directory import BlockCopy, PoolDirectory
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import (
    Chunk,
    ChunkResult,
    Filled,
    Kept,
    NeedsBlocks,
    Preempted,
    Removed,
    RowAssigned,
    Sampled,
    Sealed,
    SpareUnused,
    Step,
    StepResult,
    Trimmed,
)
from tests.engine.toy_requests import next_token

Memory = dict[tuple[int, int], int]
"""The KV of a token, which is a function of its whole context, by slot and place in the block."""


def kv_of(context: Sequence[int], position: int) -> int:
    return hash(tuple(context[: position + 1]))


class Device:
    """A device that computes steps later than they are launched, and only from the content of the pool."""

    def __init__(self, layout: KVLayout, rng: random.Random) -> None:
        self.pool: Memory = {}
        self._layout = layout
        self._rng = rng
        self._contexts: dict[int, list[int]] = {}
        self._limits: dict[int, int] = {}
        self._tables: dict[int, list[list[int]]] = {}

    def execute(self, step: Step) -> StepResult:
        for update in step.updates:
            if isinstance(update, RowAssigned):
                self._contexts[update.row], self._limits[update.row] = list(update.token_ids), update.limit
            self._tables[update.row] = update.tables
        for chunk in step.chunks:
            for source, target in chunk.copies:
                copied = {(target, place): kv for (slot, place), kv in self.pool.items() if slot == source}
                self.pool = {place: kv for place, kv in self.pool.items() if place[0] != target} | copied
        return StepResult([self._compute(chunk) for chunk in step.chunks], seconds=1e-3)

    def _compute(self, chunk: Chunk) -> ChunkResult:
        context, limit = self._contexts[chunk.row], self._limits[chunk.row]
        if not chunk.follows:
            for position in range(chunk.start, chunk.end):
                self._token(chunk.row, context, position)
            if not chunk.samples:
                return ChunkResult()
            most = 1
        else:
            most = min(chunk.length, limit - len(context))
        tokens: list[Token] = []
        for _ in range(self._rng.randint(1, most) if most else 0):
            if chunk.follows:
                self._token(chunk.row, context, len(context) - 1)
            context.append(next_token(context))
            tokens.append(Token(context[-1]))
        return ChunkResult(tokens, max(most - 1, 0))

    def _token(self, row: int, context: list[int], position: int) -> None:
        """Check the KV that the token sees, and write its own."""
        for group, table in zip(self._layout.groups, self._tables[row]):
            first = max(0, position - group.shape.window + 1) if group.shape.window else 0
            for seen in range(first, position):
                place = table[seen // group.block_tokens], seen % group.block_tokens
                assert self.pool[place] == kv_of(context, seen), f"{position} sees another content at {seen}"
            self.pool[table[position // group.block_tokens], position % group.block_tokens] = kv_of(context, position)


@dataclass
class Arena:
    """The arena, in which blocks are cleared as soon as they are given back."""

    free: list[int]
    content: Memory = field(default_factory=dict)
    used: dict[Key, list[list[int]]] = field(default_factory=dict)
    spare: dict[Key, list[int]] = field(default_factory=dict)
    """[groups]: spare blocks of requests."""

    def take_spare(self, layout: KVLayout, key: Key) -> list[int]:
        """Give a request one spare block for each group, if there are so many. Return their slots."""
        if len(self.free) >= len(layout.groups):
            self.spare[key] = [self.free.pop() for _ in layout.groups]
        return self.spare.get(key, [])

    def release_spare(self, key: Key) -> None:
        self._clear(self.spare.pop(key, []))

    def take(self, layout: KVLayout, key: Key, tokens: int) -> bool:
        tables = self.used.get(key, [[] for _ in layout.groups])
        missing = [max(0, group.blocks_for(tokens) - len(table)) for group, table in zip(layout.groups, tables)]
        if sum(missing) > len(self.free):
            return False
        for table, count in zip(tables, missing):
            table += [self.free.pop() for _ in range(count)]
        self.used[key] = tables
        return True

    def trim(self, key: Key, group: int, first_kept: int) -> None:
        table = self.used[key][group]
        self._clear(table[:first_kept])
        table[:first_kept] = [NO_SLOT] * first_kept

    def release(self, key: Key) -> None:
        for table in self.used.pop(key):
            self._clear(table)
        self.release_spare(key)

    def _clear(self, slots: Sequence[int]) -> None:
        gone = {slot for slot in slots if slot != NO_SLOT}
        self.free += gone
        self.content = {place: kv for place, kv in self.content.items() if place[0] not in gone}


@dataclass
class Wish:
    prompt: list[int]
    max_tokens: int
    adopted: bool
    """Whether the KV of its prompt is in the arena already, except for the last token."""
    leaves: bool
    """Whether the request leaves after its first token, with a handoff of its blocks."""
    kept: int = 0
    """Length at which the blocks at the end of its prompt are kept."""


class Host:
    """A scheduler whose device, copies and arena answer at random times."""

    def __init__(
        self,
        layout: KVLayout,
        pool_slots: int,
        arena_slots: int,
        limits: Limits,
        rng: random.Random,
        load_seconds: float = 1e-3,
    ) -> None:
        self.layout = layout
        directory_memory = memoryview(bytearray(PoolDirectory.bytes_for(arena_slots)))
        self.directory = PoolDirectory(directory_memory, arena_slots, pool_slots, lambda: None)
        self.device_pool = DevicePool(layout, pool_slots, self.directory)
        self.published: dict[BlockCopy, dict[int, int]] = {}
        """Content of each block in the pool that others can read, by place."""
        self.scheduler = Scheduler(limits, pool=self.device_pool)
        self.scheduler.stats.prefill_tokens_per_second = 1e3
        self._load_seconds = load_seconds
        self._sealed: dict[int, Memory] = {}
        """Content of blocks in the arena that others may read, by slot."""
        self.arena = Arena(list(range(arena_slots)))
        self.device = Device(layout, rng)
        self.outputs: dict[str, list[int]] = {}
        self._running: dict[Key, Request] = {}
        self.ended: set[str] = set()
        self.kept: set[str] = set()
        """Requests whose prompts were kept."""
        self._rng = rng
        self._steps: deque[Step] = deque()
        self._results: deque[tuple[Step, StepResult]] = deque()
        self._copies: deque[CopyBatch] = deque()
        self._asks: list[NeedsBlocks] = []
        self._contexts: dict[str, list[int]] = {}
        self._waiting: list[tuple[Key, list[int], Wish]] = []
        self._acts = [self._answer, self._plan, self._compute, self._apply, self._copy]

    def run(self, wishes: Sequence[Wish]) -> None:
        for index, wish in enumerate(wishes):
            self.outputs[str(index)] = []
            self._waiting.append((Key(str(index), 1, 1), list(wish.prompt), wish))
        for _ in range(30_000):
            self._admit()
            for act in self._rng.sample(self._acts, len(self._acts)):
                if self._rng.random() < 0.6:
                    act()
                    assert self.scheduler.check() == []
            self._take_events()
            if len(self.ended) == len(wishes) and not self.arena.used:
                return
        raise AssertionError("the requests never end")

    def _admit(self) -> None:
        while self._waiting and not self._asks:  # running requests get blocks first
            key, context, wish = self._waiting[0]
            if not self.arena.take(self.layout, key, len(context) + 1):
                return
            self._waiting.pop(0)
            request = self._request(key, context, wish)
            self._contexts[key.request_id] = request.token_ids
            self._running[request.key] = request
            self.scheduler.add(request)

    def _request(self, key: Key, context: list[int], wish: Wish) -> Request:
        """Make a request. If its prompt was adopted, write the prompt's KV into its blocks of the arena."""
        computed = len(context) - 1 if wish.adopted else 0
        for number, group in enumerate(self.layout.groups):
            self._trim(key, number, group.first_needed_block(computed))
        tables = [list(table) for table in self.arena.used[key]]
        for group, table in zip(self.layout.groups, tables):
            first = group.first_needed_block(computed) * group.block_tokens
            for position in range(first, computed):
                place = table[position // group.block_tokens], position % group.block_tokens
                self.arena.content[place] = kv_of(context, position)
            self._note_sealed(table[first // group.block_tokens : computed // group.block_tokens])
        params = SamplingParams(max_tokens=wish.max_tokens)
        own = (key, Context(context), len(wish.prompt), params, self.layout, tables, computed, wish.leaves)
        kept = wish.kept if computed <= wish.kept <= len(wish.prompt) else 0
        spare = self.arena.take_spare(self.layout, key) if kept else []
        return Request(*own, kept_len=kept if spare else 0, spare=spare)

    def _answer(self) -> None:
        if self._asks:
            ask = self._asks.pop(0)
            if ask.key in self.arena.used and self.arena.take(self.layout, ask.key, ask.token_count):
                self.scheduler.grow(ask.key, [list(table) for table in self.arena.used[ask.key]])
            else:
                self.scheduler.starve(ask.key)

    def _plan(self) -> None:
        if len(self._steps) + len(self._results) < 2 and (step := self.scheduler.plan()):
            self._steps.append(step)
        self._copies += self.scheduler.take_copies()

    def _compute(self) -> None:
        if self._steps:
            step = self._steps.popleft()
            self._results.append((step, self.device.execute(step)))
            self._check_published()

    def _apply(self) -> None:
        if self._results:
            self.scheduler.apply(*self._results.popleft())
            self._copies += self.scheduler.take_copies()

    def _copy(self) -> None:
        if self._copies:
            copies = min(self._copies, key=lambda copies: copies.rank)
            self._copies.remove(copies)
            for moves, source, target in (
                (copies.loads, self.arena.content, self.device.pool),
                ([(arena, pool) for pool, arena, *_ in copies.stores], self.device.pool, self.arena.content),
            ):
                for to, begin, *_ in moves:
                    own = {(to, place): kv for (slot, place), kv in source.items() if slot == begin}
                    for old in [place for place in target if place[0] == to]:
                        del target[old]
                    target.update(own)
            for slot, content in self._sealed.items():
                assert self._content(slot) == content, "a sealed block has changed"
            self._check_published()
            self.scheduler.finish_copies(copies, self._load_seconds, 1e-3)
            moves = (*copies.loads, *copies.stores)
            self.published |= {move._replace(pool_slot=0): self._in_pool(move.pool_slot) for move in moves}
            self._check_published()

    def _in_pool(self, slot: int) -> dict[int, int]:
        return {place[1]: kv for place, kv in self.device.pool.items() if place[0] == slot}

    def _check_published(self) -> None:
        """Check that blocks that others find by name still have their content."""
        moves = list(self.published)
        found = self.directory.find(moves)
        self.published = {moves[index]: self.published[moves[index]] for index in found.indices}
        for slot, content in zip(found.pool_slots.tolist(), self.published.values(), strict=True):
            now = self._in_pool(slot)
            assert {place: now.get(place) for place in content} == content, "a published block has changed"

    def _content(self, slot: int) -> Memory:
        return {place: kv for place, kv in self.arena.content.items() if place[0] == slot}

    def _note_sealed(self, slots: Sequence[int]) -> None:
        self._sealed |= {slot: self._content(slot) for slot in slots if slot != NO_SLOT}

    def _trim(self, key: Key, group: int, first_kept: int) -> None:
        for slot in self.arena.used[key][group][:first_kept]:
            self._sealed.pop(slot, None)
        self.arena.trim(key, group, first_kept)

    def _release(self, key: Key) -> None:
        for table in self.arena.used[key]:
            for slot in table:
                self._sealed.pop(slot, None)
        self.arena.release(key)

    def _take_events(self) -> None:
        for event in self.scheduler.take_events():
            match event:
                case Sampled(key, token, reason):
                    self.outputs[key.request_id].append(token.id)
                    if reason is not None:
                        self.scheduler.remove(key)
                case Sealed(key, group, first, hashes):
                    size = self.layout.groups[group].block_tokens
                    self._check(key, group, first * size, (first + len(hashes)) * size)
                    self._note_sealed(self.arena.used[key][group][first : first + len(hashes)])
                case Kept(key, tail, copied):
                    context = self._contexts[key.request_id]
                    for group, block in self._running[key].partial_blocks(tail.length):
                        slot = self.arena.spare[key][group] if copied else self.arena.used[key][group][block]
                        size = self.layout.groups[group].block_tokens
                        for position in range(self._first_seen(group, tail.length, block * size), tail.length):
                            assert self.arena.content[slot, position % size] == kv_of(context, position)
                    if copied:
                        self.kept.add(key.request_id)
                        self.arena.release_spare(key)
                case SpareUnused(key):
                    self.arena.release_spare(key)
                case Filled(key, length):
                    context = self._contexts[key.request_id]
                    assert length == len(context) - 1  # the request has its first token
                    for group, table in enumerate(self.arena.used[key]):  # all of it, because others will find it
                        first = table.count(NO_SLOT) * self.layout.groups[group].block_tokens
                        self._check(key, group, first, len(context) - 1)
                    self._release(key)
                    self.ended.add(key.request_id)
                case Trimmed(key, group, first_kept):
                    self._trim(key, group, first_kept)
                case Removed(key):
                    self._check_untouched(key)
                    self._release(key)
                    self.ended.add(key.request_id)
                case Preempted(key):
                    self._check_untouched(key)
                    self._release(key)
                    request = self._running[key]
                    prompt, max_tokens = request.token_ids[: request.prompt_len], request.sampling.max_tokens
                    again = Wish(prompt, max_tokens, adopted=False, leaves=request.only_first_token)
                    self._waiting.append((key._replace(generation=key.generation + 1), request.token_ids, again))
                case NeedsBlocks():
                    self._asks.append(event)

    def _check(self, key: Key, group: int, first: int, end: int) -> None:
        """Check that the arena has the KV of these tokens."""
        table, size = self.arena.used[key][group], self.layout.groups[group].block_tokens
        context = self._contexts[key.request_id]
        for position in range(first, end):
            assert self.arena.content[table[position // size], position % size] == kv_of(context, position)

    def _first_seen(self, group: int, position: int, least: int) -> int:
        """Return the first token, from `least` on, that a query at `position` sees."""
        window = self.layout.groups[group].shape.window
        return max(least, position - window + 1) if window else least

    def _check_untouched(self, key: Key) -> None:
        assert all(key != chunk.key for step in self._steps for chunk in step.chunks)
        assert all(key != copies.request.key for copies in self._copies)
