"""The engine has two threads, so that computing never waits for planning.

    host:    obey ─▶ plan step n+1 ─▶ launch ─▶ report ─▶ obey (the results of step n come as a command, too)
    compute: ······ step n ······│······ step n+1 ······│

Two steps are in flight: while one is computed, the next one waits in the queue already. If other workers of the machine
compute between two steps (`core/turns.py`), planning can use their turn. The next step is then planned just before it
begins, so that it includes requests that were handed over during the turn. While a handoff is expected, only the next
step is planned. During a long step with prompts, no further step is planned, so that the next step can begin with a
prompt that arrives during the long step.

Encoders run on the compute thread, too (`compute_thread.py`).

If the device computes in a pool of its own, a third thread copies blocks between the pool and the arena.

The engine knows neither sockets nor event loops: commands come through a thread-safe queue, events leave through a
callback.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from paceline.core.machine import name_thread
from paceline.core.metrics import Sample
from paceline.core.turns import Turns
from paceline.core.types import Key
from paceline.engine.background import BackgroundTurns
from paceline.engine.compute_pool import CopyBatch
from paceline.engine.compute_thread import STEP_SECONDS, ComputeThread, EncodeJob, Launch, Runner
from paceline.engine.copier import Copier
from paceline.engine.pool_directory import PeerPools
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.stats import SchedulerStats
from paceline.engine.step import Event, Step, StepResult
from paceline.kernels.block_copies import BlockCopies

STEPS_IN_FLIGHT = 2
HELD_SECONDS = 0.01
"""Interval in seconds at which a worker checks whether other workers still compute urgent requests, while its
background requests wait for them.
"""

log = logging.getLogger(__name__)


class Engine:
    """Threads that drive a scheduler and a runner.

    Args:
        on_events: called on the host thread; must return at once.
        on_failure: called when computing or planning has failed and the engine has stopped.
        steps_in_flight: largest number of launched steps without results; 1 plans each step after the last results.
        turns: the turns of this worker, if other workers use the same cores.
        copies: copies blocks between the device's pool and the host's arena, if the device has a pool of its own.
        peers: pools that are asked for a block before it is loaded from the arena.
        itl_target: target for the length of steps with urgent requests, in seconds; None if there is none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        on_events: Callable[[list[Event]], None],
        on_failure: Callable[[BaseException], None],
        steps_in_flight: int = STEPS_IN_FLIGHT,
        turns: Turns | None = None,
        copies: BlockCopies | None = None,
        peers: PeerPools | None = None,
        itl_target: float | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._background = BackgroundTurns(None if turns is None else turns.page, itl_target)
        self._holds_back = False
        """Whether the last plan left out the background."""
        self._on_events = on_events
        self._on_failure = on_failure
        self._most_in_flight = self._depth = steps_in_flight
        self._turns = turns
        self._in_flight = 0
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.computing = ComputeThread(runner, turns, self._pass_result, self._pass_turn)
        self._copier = None if copies is None else Copier(copies, peers, self._take_copied)
        threads = {"host": self._run, "compute": self.computing.run}
        if self._copier is not None:
            threads["copy"] = self._copier.run
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"engine-{name}", daemon=True)
            for name, work in threads.items()
        ]
        self.plan_seconds = 0.0
        """Time that the host thread spent on commands, results and plans, while steps were computed."""
        self.output_seconds = 0.0
        """Time that the host thread spent on sending events, while steps were computed."""
        self._expecting = 0.0
        self._last_is_long = False
        """Whether the newest planned step takes so long that the next one is planned only after it has ended."""
        self._idle = True
        self._woken = 0.0

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float = 10.0) -> bool:
        """End the threads after all earlier commands and the step under way. This also waits for the turn of other
        workers.

        A launched step that has not begun is dropped, because no thread would take its results.

        Returns:
            False if the threads need longer than `timeout` seconds. Then the step may still write into its blocks.
        """
        self.computing.stopping = True
        self._inbox.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def add(self, request: Request) -> None:
        self._inbox.put(lambda: self._add(request))

    def remove(self, key: Key) -> None:
        """Drop a request. The engine may touch the request's blocks until its event `Removed`."""
        self._inbox.put(lambda: self._scheduler.remove(key))

    def grow(self, key: Key, tables: Sequence[list[int]]) -> None:
        self._inbox.put(lambda: self._scheduler.grow(key, tables))

    def provide(self, key: Key, span: int, slots: Sequence[int]) -> None:
        """Give a request the slots of a span's encoding, by a call of `Scheduler.provide` on the host thread."""
        self._inbox.put(lambda: self._scheduler.provide(key, span, slots))

    def starve(self, key: Key) -> None:
        self._inbox.put(lambda: self._scheduler.starve(key))

    def encode(self, job: EncodeJob) -> None:
        """Run an encoder between steps. The caller launches one job at a time. If the engine stops, `on_end` may never
        be called.
        """
        self.computing.launched.put(job)

    def between_steps(self, act: Callable[[], None]) -> None:
        """Call `act` on the compute thread, after all steps that are launched now and before all later steps."""
        self.computing.launched.put(act)

    def forget(self, told: Callable[[int], None]) -> None:
        """Forget the blocks of the device's own pool that no request uses.

        Args:
            told: called on the host thread with the number of blocks that were forgotten.
        """
        self._inbox.put(lambda: told(self._scheduler.forget()))

    @property
    def step_seconds(self) -> float:
        """Seconds since the current step, or the current piece of an encoder, began; 0 while there is none."""
        return self.computing.step_seconds

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    def samples(self) -> Iterator[Sample]:
        """Yield all figures for metrics. Any thread may call this."""
        yield from self.stats.samples()
        yield from self.computing.samples()
        for kind in ("plan", "output"):
            figure = f"{kind}_seconds"
            yield Sample(figure, getattr(self, figure), STEP_SECONDS, {"kind": kind})

    # ---- the host thread

    def _run(self) -> None:
        while self._obey_commands():
            while self._in_flight < self._most_steps and (step := self._plan()) is not None:
                self.computing.launched.put(Launch(step, self._woken if self._idle else None))
                self._in_flight += 1
                self._last_is_long = self._scheduler.is_long(step)
                self._idle = False
            for copies in self._scheduler.take_copies():
                assert self._copier is not None
                self._copier.submit(copies)
            if self._in_flight == 0 and self._depth > 0:
                self._idle, self._depth = True, self._most_in_flight
            planned = time.perf_counter()
            self._report()
            self.plan_seconds += planned - self._woken
            self.output_seconds += time.perf_counter() - planned
        self._report()  # events of commands that came together with the command to stop
        self.computing.launched.put(None)
        self._end_copier()

    @property
    def _most_steps(self) -> int:
        """The most steps that may be in flight now."""
        return min(self._depth, 1) if self._expecting or self._last_is_long else self._depth

    def _plan(self) -> Step | None:
        """Return the next step, or None if no request can continue now."""
        is_urgent, has_background = self._scheduler.classes()
        background = self._background.rows(is_urgent)
        self._holds_back = has_background and background == 0
        return self._scheduler.plan(background, time.monotonic())

    def _obey_commands(self) -> bool:
        """Wait for commands (results are commands, too) and carry out all that have come. Return False to stop."""
        commands: list[Callable[[], None] | None] = []
        held = HELD_SECONDS if self._holds_back and self._in_flight == 0 else None
        with contextlib.suppress(queue.Empty):  # the request that was expected has not come in time
            commands.append(self._inbox.get(timeout=self._expecting or held))
        self._woken = time.perf_counter()
        while not self._inbox.empty():  # no other thread takes from it
            commands.append(self._inbox.get())
        for command in commands:
            if command is None:
                return False
            command()
        self._expecting = 0.0 if self._turns is None else self._turns.expecting()
        return True

    def _add(self, request: Request) -> None:
        self._scheduler.add(request)
        if self._turns is not None and request.decodes:
            self._turns.received()

    def _pass_result(self, step: Step, result: StepResult, yields: bool) -> None:
        """Pass a result on to the host thread. Called on the compute thread."""
        self._inbox.put(partial(self._take_result, step, result, yields))

    def _pass_turn(self, others_go_on: bool) -> None:
        self._inbox.put(partial(self._end_yield, others_go_on))

    def _take_result(self, step: Step, result: StepResult, yields: bool) -> None:
        self._in_flight -= 1
        self._depth = 0 if yields else self._most_in_flight
        self._background.note(step, result)
        self._scheduler.apply(step, result)

    def _end_yield(self, others_go_on: bool) -> None:
        """Choose the number of steps in flight. If others go on, they will want a turn after the next step, too; the
        step after that can be planned in their turn."""
        self._depth = 1 if others_go_on else self._most_in_flight

    def _take_copied(self, copies: CopyBatch, seconds: float, waited: float, from_device: int) -> None:
        """Pass a copied batch on to the host thread. Called on the copy thread."""
        self._inbox.put(partial(self._scheduler.finish_copies, copies, seconds, waited, from_device))

    def _end_copier(self) -> None:
        if self._copier is not None:
            self._copier.end()

    def _report(self) -> None:
        if events := self._scheduler.take_events():
            self._on_events(events)

    def _guarded(self, work: Callable[[], None]) -> None:
        name_thread()
        try:
            work()
        except BaseException as error:
            log.exception("the engine failed")
            self._inbox.put(None)
            self.computing.launched.put(None)
            self._end_copier()
            self._on_failure(error)
