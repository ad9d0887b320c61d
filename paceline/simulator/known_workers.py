"""The workers as the gateway of a simulation knows them: the loads in their heartbeats, and the gateway's later
calls.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from paceline.proto.fleet_pb2 import LoadReport
from paceline.services.common.registry import Member
from paceline.services.gateway.fleet.remote_worker import RECENT_SECONDS, WorkerCalls
from paceline.services.gateway.routing.candidate_table import CandidateTable
from paceline.simulator.events import Events
from paceline.simulator.worker import SimulatedWorker


class KnownWorkers:
    """The workers that have joined and not ended.

    Args:
        max_model_len: tokens of the longest context of each worker.
    """

    def __init__(self, events: Events, max_model_len: int) -> None:
        self.workers: dict[str, SimulatedWorker] = {}
        self.host_names: dict[int, str] = {}
        """Names of all hosts on which a worker was, by their numbers."""
        self.calls: dict[str, WorkerCalls] = {}
        """The gateway's calls under way at each worker, by the worker's name."""
        self._table = CandidateTable(RECENT_SECONDS, lambda: events.now)
        self._events = events
        self._max_model_len = max_model_len
        self._changed: set[SimulatedWorker] = set()
        """Workers whose newest loads are not in the table yet."""

    def join(self, worker: SimulatedWorker) -> None:
        """Add a worker that is ready."""
        member = Member(
            worker.name,
            worker.role,
            1,
            "",
            worker.host.name,
            layout="kv",
            max_model_len=self._max_model_len,
            max_seqs=worker.kit.times.max_seqs,
        )
        self.workers[worker.name] = worker
        self.host_names[worker.host.number] = worker.host.name
        note_change = partial(self._changed.add, worker)
        self.calls[worker.name] = WorkerCalls(member, lambda: self._events.now, note_change)
        self._changed.add(worker)

    def withdraw(self, worker: SimulatedWorker) -> None:
        """Take a worker out of the candidates, so that it gets no new requests."""
        self._table.remove(worker.name)

    def forget(self, worker: SimulatedWorker) -> None:
        """Remove a worker that has ended, and its calls."""
        self._table.remove(worker.name)
        self.workers.pop(worker.name, None)
        self.calls.pop(worker.name, None)

    def hear(self, worker: SimulatedWorker) -> None:
        """Take over the load that a worker's heartbeat reports."""
        calls = self.calls[worker.name]
        load = LoadReport(
            running=len(worker.admitted),
            waiting=len(worker.preempted),
            queued_tokens=worker.queued_tokens,
            prefill_tokens_per_second=worker.tokens_per_second,
        )
        lora = worker.adapters.report()
        calls.note_current()
        if load != calls.member.load or calls.unreported or calls.in_flight or lora != calls.member.lora:
            calls.update(dataclasses.replace(calls.member, load=load, lora=lora))

    def candidates(self) -> CandidateTable:
        """Return the table of the workers that take work, with their newest loads."""
        while self._changed:
            worker = self._changed.pop()
            if worker.state == "ready" and worker.name in self.calls:
                self._table.put(self.calls[worker.name].candidate(worker.host.fetch_tokens_per_second))
        return self._table
