"""A fleet of stand-in workers for `bench.fleet.planner`, whose steps take as long as a formula says. It needs no clock.

A prefill worker computes one prompt after the other, in chunks. A decode worker runs its requests at the same time;
between two changes of its batch, all steps are computed at once. Requests wait at the gateway if no decode worker has a
place, as they do in a real fleet.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from bench.fleet.planner_workers import Request, Worker
from paceline.core.planner.actions import Add, Decision, Drain, Flip
from paceline.core.planner.distribution import Distribution
from paceline.core.planner.reports import Report, Role, RoleReport, Steps, Traffic, WorkerReport


class Machine(NamedTuple):
    """Times of a worker in seconds, and its size. A decode step of n sequences takes fixed + n * sequence + context."""

    startup: float
    drain: float
    flip: float
    chunk: int
    """Tokens of a prompt that one step computes."""
    prefill_fixed: float
    prefill_token: float
    decode_fixed: float
    decode_sequence: float
    decode_context: float
    """Seconds for each token of context."""
    max_seqs: int
    kv_tokens: int
    cold: float
    """The steps of a new worker take this many times as long for its first `COLD_SECONDS`."""


GPU = Machine(60.0, 10.0, 4.0, 2048, 0.01, 0.00012, 0.012, 0.00025, 1e-7, 128, 250_000, 4.0)
STAND_IN = Machine(8.0, 2.0, 2.0, 512, 0.02, 0.00035, 0.028, 0.004, 0.0, 64, 200_000, 1.0)
"""About the built-in step times of `bench.fleet.planner_live`."""
HANDOFF = 0.02
COLD_SECONDS = 3.0


class Fleet:
    """The fleet, its gateway and its platform. `at` is the simulated time in seconds."""

    def __init__(self, counts: dict[Role, int], machine: Machine) -> None:
        self.at = 0.0
        self.machine = machine
        self.wanted = dict(counts)
        self.workers: list[Worker] = []
        self.waiting: deque[Request] = deque()
        self.ended: list[Request] = []
        self.device_seconds = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self._revision = 0
        self._traffic: dict[str, list[Request]] = {}
        self._started: list[Request] = []
        self._finished: list[Request] = []
        self._reported = 0.0
        for role, count in counts.items():
            for _ in range(count):
                self._start(role, 0.0)

    def call(self, delay: float, event: Callable[[], None]) -> None:
        """Let something happen later."""
        heapq.heappush(self._events, (self.at + delay, next(self._order), event))

    def run(self, until: float) -> None:
        """Let everything happen up to this instant."""
        while self._events and self._events[0][0] <= until:
            at, _, event = heapq.heappop(self._events)
            self._pass(at)
            event()
        self._pass(until)

    def arrive(self, request: Request) -> None:
        """Receive a request from a client."""
        self._traffic.setdefault(request.name, []).append(request)
        self.waiting.append(request)
        self._place()

    def apply(self, decision: Decision) -> None:
        """Carry out a decision, unless somebody else has acted since its report."""
        if decision.advisory or decision.expects != str(self._revision):
            return
        for action in decision.actions:
            if isinstance(action, Add):
                for _ in range(action.count - self.wanted[action.role]):
                    self._start(action.role, self.machine.startup)
                self.wanted[action.role] = action.count
            elif isinstance(action, Drain):
                self.leave(next(each for each in self.workers if each.name == action.worker))
                self.wanted[action.role] = action.count
            elif isinstance(action, Flip):
                worker = next(each for each in self.workers if each.name == action.worker)
                self.leave(worker)
                self._start(action.to, self.machine.flip, worker.name)
                self.wanted[action.role] -= 1
                self.wanted[action.to] += 1
            self._revision += 1

    def leave(self, worker: Worker) -> None:
        """Let a worker end. Its requests continue on other workers from their KV."""
        self.workers.remove(worker)
        self._advance(worker)
        worker.epoch += 1
        self.waiting.extendleft(reversed(worker.queue))
        for request in worker.queue:
            if request.decode:
                request.decode.reserved -= 1
        for request in list(worker.running):
            self._take_out(worker, request)
            other = min(self.ready("decode"), key=lambda each: each.load)
            self._join(other, request)
        self._place()

    def ready(self, role: Role) -> list[Worker]:
        """Return the workers of a role that take requests."""
        return [each for each in self.workers if each.role == role and each.state == "ready"]

    def _pass(self, at: float) -> None:
        self.device_seconds += (at - self.at) * len(self.workers)
        self.at = at

    def _start(self, role: Role, seconds: float, name: str = "") -> None:
        worker = Worker(name or f"w{next(self._names)}", role, since=self.at, at=self.at)
        self.workers.append(worker)

        def is_ready() -> None:
            if worker in self.workers:
                worker.state, worker.since, worker.at = "ready", self.at, self.at
                worker.started = -1e9 if name else self.at
                self._place()

        self.call(seconds, is_ready)

    def _place(self) -> None:
        """Give waiting requests their places, first come, first served."""
        most, full = self.machine.max_seqs, 0.95 * self.machine.kv_tokens
        while self.waiting:
            prefill, decode = self.ready("prefill"), self.ready("decode")
            decode = [each for each in decode if each.load < most and each.context < full]
            if not prefill or not decode:
                return
            request = self.waiting.popleft()
            request.decode = min(decode, key=lambda each: each.load)
            request.decode.reserved += 1
            worker = min(prefill, key=lambda each: sum(other.prompt for other in each.queue))
            worker.queue.append(request)
            self._compute(worker)

    def _compute(self, worker: Worker) -> None:
        if worker.is_busy or not worker.queue:
            return
        worker.is_busy = True
        request = worker.queue[0]
        seconds, left = 0.0, request.prompt
        while left > 0:
            tokens = min(left, self.machine.chunk)
            step = self._slowed(worker, self.machine.prefill_fixed + self.machine.prefill_token * tokens)
            worker.note(tokens, request.prompt - left + tokens, step, 1)
            seconds, left = seconds + step, left - tokens
        epoch = worker.epoch

        def computed() -> None:
            if worker.epoch != epoch or worker not in self.workers:
                return
            worker.queue.popleft()
            worker.is_busy = False
            request.first = self.at
            self._started.append(request)
            assert request.decode
            request.decode.reserved -= 1
            if request.decode in self.workers:
                self._join(request.decode, request)
            else:
                self._join(min(self.ready("decode"), key=lambda each: each.load), request)
            self._compute(worker)

        self.call(seconds, computed)

    def _join(self, worker: Worker, request: Request) -> None:
        self._advance(worker)
        worker.running[request] = None
        request.decode, request.joined = worker, round(worker.steps)
        worker.base += request.prompt + request.done - request.joined
        request.gaps.append((HANDOFF, 1))
        self._schedule(worker)

    def _take_out(self, worker: Worker, request: Request) -> None:
        """End a request's stay on a worker, and keep the times between its tokens."""
        del worker.running[request]
        worker.base -= request.prompt + request.done - request.joined
        request.done += round(worker.steps) - request.joined
        for before, count, seconds in reversed(worker.history):
            if before + count <= request.joined:
                break
            request.gaps.append((seconds, before + count - max(before, request.joined)))

    def _advance(self, worker: Worker) -> None:
        """Compute the steps of a decode worker up to now."""
        passed, count = self.at - worker.at, len(worker.running)
        worker.at = self.at
        if not count or passed <= 0:
            return
        step = self._step(worker)
        steps = passed / step
        worker.note(count, worker.context, step, steps)
        worker.history.append((worker.steps, steps, step))
        worker.steps += steps
        if len(worker.history) > 20_000:
            del worker.history[:10_000]

    def _step(self, worker: Worker) -> float:
        times, count = self.machine, len(worker.running)
        seconds = times.decode_fixed + times.decode_sequence * count + times.decode_context * worker.context
        return self._slowed(worker, seconds)

    def _slowed(self, worker: Worker, seconds: float) -> float:
        return seconds * (self.machine.cold if self.at - worker.started < COLD_SECONDS else 1.0)

    def _schedule(self, worker: Worker) -> None:
        """Schedule the end of the request that ends first."""
        worker.epoch += 1
        if not worker.running:
            return
        epoch = worker.epoch
        left = min(each.joined + each.answer - each.done for each in worker.running) - worker.steps

        def ends() -> None:
            if worker.epoch != epoch or worker not in self.workers:
                return
            self._advance(worker)
            for request in [
                each for each in worker.running if worker.steps >= each.joined + each.answer - each.done - 0.5
            ]:
                self._take_out(worker, request)
                self.ended.append(request)
                self._finished.append(request)
            self._schedule(worker)
            self._place()

        # The batch is looked at again at least twice a second, because contexts grow and cold workers get warm.
        self.call(min(max(left, 0.01) * self._step(worker), 0.5), ends)

    def report(self) -> Report:
        """Return the report of the time since the last one."""
        seconds = max(self.at - self._reported, 1e-9)
        self._reported = self.at
        names = {each.name for each in (*self._started, *self._finished, *self.waiting)} | self._traffic.keys()
        traffic = {name: self._class(name, seconds) for name in sorted(names)}
        self._traffic, self._started, self._finished = {}, [], []
        times = self.machine
        roles = {
            role: RoleReport(count, startup_seconds=times.startup, drain_seconds=times.drain, flip_seconds=times.flip)
            for role, count in self.wanted.items()
        }
        workers = tuple(self._worker(each) for each in self.workers)
        return Report(self.at, str(self._revision), workers, roles, traffic)

    def _class(self, name: str, seconds: float) -> Traffic:
        arrived = self._traffic.get(name, [])
        waiting = [each for each in self.waiting if each.name == name]
        ended = [each for each in self._finished if each.name == name]
        itl = Distribution()
        for request in ended:
            for gap, count in request.gaps:
                itl.add(gap, count)
        return Traffic(
            seconds,
            arrivals=len(arrived),
            finished=len(ended),
            waiting=len(waiting),
            oldest_wait=max((self.at - each.arrived for each in waiting), default=0.0),
            prompt_tokens=Distribution.of(each.prompt for each in arrived),
            answer_tokens=Distribution.of(each.answer for each in ended),
            ttft=Distribution.of(each.first - each.arrived for each in self._started if each.name == name),
            itl=itl,
        )

    def _worker(self, worker: Worker) -> WorkerReport:
        self._advance(worker)
        steps = tuple(
            Steps(tokens / times.count, context / times.count, times)
            for tokens, context, times in worker.batches.values()
        )
        worker.batches = {}
        return WorkerReport(
            worker.name,
            worker.role,
            state=worker.state,
            state_seconds=self.at - worker.since,
            running=worker.load,
            queued_tokens=sum(each.prompt for each in worker.queue),
            max_seqs=self.machine.max_seqs if worker.role == "decode" else 16,
            kv_pressure=worker.context / self.machine.kv_tokens,
            kv_tokens=self.machine.kv_tokens,
            flips_to=("prefill", "decode"),
            loss=float(worker.context or sum(each.prompt for each in worker.queue)),
            steps=steps,
        )
