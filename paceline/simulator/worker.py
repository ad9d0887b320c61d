"""A worker that only takes time: the rules of `engine/scheduler.py`, with steps whose times come from a profile.

While only decoding sequences run, the steps until the next change are one event, whose end is a sum in constant time.
If work comes meanwhile, the event is cut at the boundary of a step. `is_coalesced=False` makes an event of each step; a
test compares both, and another one compares this with the engine's own scheduler.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

from paceline.engine.prompt_order import PromptOrder, is_long
from paceline.engine.stats import MEASURED_TOKENS
from paceline.simulator.adapters import DEFAULT, AdapterOptions, SimulatedAdapters
from paceline.simulator.cores import Cores
from paceline.simulator.events import Events
from paceline.simulator.host import Host
from paceline.simulator.rows import SimulatedRow, SimulatedRows
from paceline.simulator.run_clock import RunClock
from paceline.simulator.sequence import Sequence
from paceline.simulator.steps import Kit, Run, plan_prompts

Role = Literal["prefill", "decode"]
State = Literal["starting", "ready", "draining", "gone"]


class Owner(Protocol):
    """The receiver of the results of workers' steps. All calls come at the end of a step."""

    def computed(self, worker: SimulatedWorker, sequence: Sequence, tokens: int) -> None:
        """Note that a worker has computed `tokens` more tokens of a prompt. After the last chunk, the first token is
        known.
        """

    def ended(self, worker: SimulatedWorker, sequence: Sequence) -> None:
        """Note that a sequence has all of its tokens."""

    def needs_blocks(self, worker: SimulatedWorker, row: SimulatedRow) -> None:
        """Note that the blocks of a row are nearly full. The owner calls `grown` or `leave` of the worker's rows in
        return."""

    def stepped(self, worker: SimulatedWorker, run: Run) -> None:
        """Note that the steps of a run have ended."""


class SimulatedWorker:
    """One worker of a fleet.

    Args:
        number: distinguishes the worker from all others, and decides where in the series of ratios the worker begins.
        cores: the cores that the worker shares with other workers of its host; None if it has a device of its own.
    """

    def __init__(
        self,
        number: int,
        role: Role,
        host: Host,
        kits: dict[Role, Kit],
        events: Events,
        owner: Owner,
        cores: Cores | None = None,
        is_coalesced: bool = True,
        adapters: AdapterOptions = DEFAULT,
    ) -> None:
        self.number, self.name, self.host = number, f"w{number:05}", host
        self.session = 2 * number + 3
        """Number of the worker's session at the host's ledger; sessions of workers have odd numbers."""
        self.state: State = "starting"
        self.since = events.now
        """Instant at which the worker entered its present state."""
        self.admitted: dict[Sequence, None] = {}
        """Sequences that occupy a place, in the order of their admission."""
        self.adapters = SimulatedAdapters(adapters)
        self.preempted: list[Sequence] = []
        """Sequences that lost their blocks and wait for new ones, in order."""
        self.queued_tokens = 0
        """Number of prompt tokens that the worker has accepted but not computed yet."""
        self.tokens_per_second = 0.0
        self.busy_seconds = 0.0
        self.steps = 0
        self._events, self._owner, self.cores = events, owner, cores
        self._is_coalesced = is_coalesced
        self._kits = kits
        self._prompts: dict[Sequence, int] = {}  # in order of arrival; the first step that may include each
        self._joining: dict[Sequence, tuple[int, int]] = {}  # the first step of each, and the capacity of its blocks
        self.clock = RunClock(events, self._end)
        """The steps under way."""
        self._is_ending = False
        """Whether the owner is being told of the ends of steps, so that the next steps are not planned yet."""
        self._planned_speed: float | None = None
        """The measured rate of prompts when the next step was planned, if it was planned ahead."""
        self._lingering = 0
        """Number of sequences that ended with the last step, but were still there when the next one was planned."""
        self._ended = 0.0
        """Instant at which the newest run of steps ended."""
        self.take_role(role)

    def take_role(self, role: Role) -> None:
        """Begin to work in a role. The worker must have no requests."""
        self.role = role
        self.kit = self._kits[role]
        self.rows = SimulatedRows(self.kit.yields)
        self._order = PromptOrder(self.kit.times.max_batched_tokens)
        self._offset = self.number * 2_654_435_761 % (1 << 20)
        if self.cores is not None:
            self.cores.enter(self)

    @property
    def has_room(self) -> bool:
        return len(self.admitted) < self.kit.times.max_seqs and not self.preempted

    @property
    def is_computing(self) -> bool:
        return self.clock.run is not None

    @property
    def has_work(self) -> bool:
        return bool(self.clock.run or self._prompts or self._joining or self.rows.count)

    # ---- work that comes and goes

    def compute(self, sequence: Sequence) -> None:
        """Compute a prompt, from `sequence.computed` on."""
        sequence.prompt_arrival = None
        self.queued_tokens += sequence.left_len
        self._prompts[sequence] = self._first_step()
        self._begin()

    def decode(self, sequence: Sequence, capacity: int) -> None:
        """Decode a sequence, whose blocks have room for `capacity` tokens."""
        self._joining[sequence] = (self._first_step(), capacity)
        self._begin()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, by the end of the step under way at the latest. The sequence keeps its tokens so far."""
        if self._prompts.pop(sequence, None) is not None:
            self.queued_tokens -= max(0, sequence.left_len)
        self._joining.pop(sequence, None)
        if self.rows.has(sequence):
            run = self.clock.run
            if run is not None and run.steps > 1:
                self._count_steps_so_far(run)
            self.rows.leave(sequence)

    def _count_steps_so_far(self, run: Run) -> None:
        """End the run after the steps that are over, and begin the step under way as another run."""
        over = self.clock.steps_begun() - 1
        if over:
            end = run.begin + run.seconds(over)
            self._note(run, over)
            self.rows.advance(over)
            first = run.first + over * run.growth
            context = run.context + over * run.rows * self.kit.yields.mean
            run = Run(
                end, run.index + over, 1, run.ratios, first, 0.0, [], run.rows, context, run.by_group, [], False, 0.0
            )
        run.steps = 1
        self.clock.begin(run)

    def stop(self) -> list[Sequence]:
        """End the worker at once. Return all of its sequences, which keep their tokens so far."""
        sequences = list(self.admitted)
        for sequence in sequences:
            self.remove(sequence)
        self.clock.stop()
        self.admitted.clear()
        self.preempted.clear()
        if self.cores is not None:
            self.cores.leave(self)
        return sequences

    # ---- steps

    def _first_step(self) -> int:
        """Return the number of the first step that can include work that comes now, and end the run before it."""
        run = self.clock.run
        if run is None:
            return self.rows.step
        steps = self.clock.steps_begun()
        if not run.is_long and (steps < run.steps or self._goes_on_after(run)):
            steps += self.kit.times.planned_steps
        self.clock.cut(steps)
        return run.index - self._offset + steps

    def _goes_on_after(self, run: Run) -> bool:
        """Return whether there is work for the step after a run, so that this step is planned already."""
        end = run.index - self._offset + run.steps
        rest = {
            sequence: sequence.computed + tokens < sequence.context or self._decodes(sequence)
            for sequence, tokens in run.chunks
        }
        return (
            any(first <= end for first, _ in self._joining.values())
            or any(first <= end and rest.get(sequence, True) for sequence, first in self._prompts.items())
            or any(row.end_step > end for row in self.rows)
        )

    def _decodes(self, sequence: Sequence) -> bool:
        """Return whether a sequence decodes here after its prompt was computed here."""
        return not sequence.is_handed_over and sequence.left > 1

    def _begin(self) -> None:
        """Begin the next steps, if none is under way and there is work."""
        if self.clock.run is not None or self._is_ending or not self.has_work or self.state == "gone":
            return
        if self.cores is not None and not self.cores.may_begin(self):
            return
        run = self._plan(self.rows.step) or self._plan(None)
        self._lingering = 0
        if run is not None:
            self.clock.begin(run, 1.0 if self.cores is None else self.cores.speed_of(self))
            if self.cores is not None:
                self.cores.begun(self)

    def _plan(self, step: int | None) -> Run | None:
        """Return the next steps; None if nothing may run in step number `step`. If it is None, all work may run."""
        joined = [prompt for prompt, (first, _) in self._joining.items() if step is None or first <= step]
        for sequence in joined:
            _, capacity = self._joining.pop(sequence)
            self.rows.join(sequence, capacity)
        times, rows = self.kit.times, self.rows.count
        drafts = times.drafts.most
        waiting = (prompt for prompt, first in self._prompts.items() if step is None or first <= step)
        speed = self.tokens_per_second if self._planned_speed is None or step is None else self._planned_speed
        room = times.max_batched_tokens - rows - self._lingering
        chunks = plan_prompts(waiting, self._order, room, speed, self._events.now)
        if not chunks and not rows:
            return None
        steps, context = 1, self.rows.context
        ratios = self.kit.prompts if chunks else self.kit.decoding
        index = self.rows.step + self._offset
        if chunks:
            tokens = sum(count for _, count in chunks)
            pairs = sum(count * (prompt.computed + count / 2) for prompt, count in chunks)
            first = times.steps.mixed_seconds(tokens, pairs, rows * (1 + drafts), context, rows * drafts)
            growth = 0.0
        else:
            first = times.steps.decode_seconds(rows * (1 + drafts), context, rows * drafts)
            growth = times.steps.decode_context * self.rows.growth
            if self.cores is not None and self.cores.is_wanted(self):
                first = self.cores.decode_seconds(first, rows * (1 + drafts), times.steps.decode_context * context)
                ratios = self.cores.decode_ratios
            elif self._is_coalesced:
                coming = [first for first, _ in self._joining.values()] + list(self._prompts.values())
                steps = min([self.rows.steps_until_due(), *(first - self.rows.step for first in coming)])
        groups = dict(self.rows.by_group) if rows else {}
        now = self._events.now
        waited = now - self._ended if rows > len(joined) else 0.0
        long = is_long(sum(count for _, count in chunks), speed)
        return Run(now, index, steps, ratios, first, growth, chunks, rows, context, groups, joined, long, waited)

    def _end(self, run: Run) -> None:
        """Report the results of steps, and begin the next ones."""
        self._is_ending = True
        self._ended = self._events.now
        is_planned = not run.is_long and self.kit.times.planned_steps > 0
        self._planned_speed = self.tokens_per_second if is_planned else None
        self._note(run, run.steps)
        due = self.rows.advance(run.steps)
        if self.cores is not None:
            last = range(max(0, run.steps - 8), run.steps)
            self.cores.ended(self, [run.ratios.at(run.index + i) * (run.first + i * run.growth) for i in last])
        for sequence, tokens in run.chunks:
            if sequence in self._prompts:
                sequence.computed += tokens
                self.queued_tokens -= tokens
                if not sequence.is_computing:
                    del self._prompts[sequence]
                    self._lingering += not self._decodes(sequence)
                self._owner.computed(self, sequence, tokens)
        for row in due:
            if row.end_step <= self.rows.step:
                self._lingering += 1
                self.rows.leave(row.sequence)
                self._owner.ended(self, row.sequence)
        # Rows that have ended give their blocks back first. Otherwise other rows could be preempted for lack of blocks.
        for row in due:
            if row.is_here:
                self._owner.needs_blocks(self, row)
        self._lingering *= is_planned
        self._is_ending = False
        self._begin()
        self._lingering, self._planned_speed = 0, None
        if self.clock.run is None and self.cores is not None:
            self.cores.idle(self)

    def _note(self, run: Run, steps: int) -> None:
        """Count steps of a run that have ended."""
        seconds = run.seconds(steps)
        self.steps += steps
        self.busy_seconds += seconds
        prompts = sum(tokens for _, tokens in run.chunks)
        taken = self._events.now - run.begin  # pauses count, as in a real worker
        if prompts >= MEASURED_TOKENS and taken > 0:
            speed, known = (prompts + run.rows) / taken, self.tokens_per_second
            self.tokens_per_second = speed if known == 0 else known + (speed - known) / 8
        if steps != run.steps:
            run = dataclasses.replace(run, steps=steps)
        self._owner.stepped(self, run)

    # ---- shared cores

    def wake(self) -> None:
        """Begin the next steps if the worker may compute on its cores now."""
        self._begin()
