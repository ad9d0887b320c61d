"""Preemption: if a host has no blocks left, the newest sequence of a worker gives its blocks back and continues
later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from paceline.core.errors import BusyError
from paceline.simulator.events import Events
from paceline.simulator.host import Host
from paceline.simulator.recorder import SimulationRecorder
from paceline.simulator.rows import SimulatedRow
from paceline.simulator.sequence import Sequence
from paceline.simulator.worker import SimulatedWorker


class Preemption:
    """Gives rows more blocks, and takes blocks from other sequences if the host has none left.

    Args:
        move: a function that ends an attempt, so that its request continues on another worker.
    """

    def __init__(self, events: Events, recorder: SimulationRecorder, move: Callable[[Sequence], object]) -> None:
        self._events, self._recorder, self._move = events, recorder, move
        self._short: dict[Host, set[SimulatedWorker]] = defaultdict(set)
        """Workers with preempted sequences, by their hosts."""

    def extend(self, worker: SimulatedWorker, row: SimulatedRow) -> None:
        """Give a row more blocks. If the host has none left, the worker's newest sequence gives back its blocks."""
        sequence, now = row.sequence, self._events.now
        length = worker.rows.length(row)
        worker.host.seal(sequence, length - 1, now)
        while row.is_here:
            try:
                worker.rows.grown(row, worker.host.extend(sequence, length, now))
                return
            except BusyError:
                self._preempt(worker, next((other for other in reversed(worker.admitted) if other.held), sequence))

    def _preempt(self, worker: SimulatedWorker, sequence: Sequence) -> None:
        """Take all blocks of a sequence away. The sequence waits for new blocks, or its request moves to another
        worker.
        """
        self._recorder.preemptions += 1
        if worker.rows.has(sequence):
            # It keeps its place, and computes its context again when it gets other blocks.
            worker.rows.leave(sequence)
            worker.host.release(sequence, self._events.now)
            sequence.attempt += 1
            worker.preempted.append(sequence)
            self._short[worker.host].add(worker)
        else:  # Another worker may be computing its prompt.
            self._move(sequence)

    def retry(self, host: Host) -> None:
        """Let preempted sequences of a host continue, in order, as far as the host has blocks for them."""
        short = self._short.pop(host, ())
        for worker in sorted(short, key=lambda waiting: waiting.number):
            while worker.preempted and worker.state == "ready":
                sequence = worker.preempted[0]
                sequence.context = sequence.prompt_tokens + sequence.done
                sequence.attempt += 1
                try:
                    sequence.cached = sequence.computed = host.reserve(sequence, worker.session, self._events.now)
                except BusyError:
                    break
                worker.preempted.pop(0)
                worker.compute(sequence)
            if worker.preempted and worker.state != "gone":
                self._short[host].add(worker)
