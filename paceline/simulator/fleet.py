"""The workers of a simulated fleet: their starts, drains, flips and failures, and their costs."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable

from paceline.core.cache_policy.registry import find_policy
from paceline.core.prefix import BlockHolders
from paceline.core.step_times import Profile, WorkerTimes
from paceline.simulator.cores import Cores
from paceline.simulator.events import Events
from paceline.simulator.gateway import SimulatedGateway
from paceline.simulator.host import Host
from paceline.simulator.scenario import Scenario
from paceline.simulator.series import Yields, ratios_of
from paceline.simulator.steps import Kit
from paceline.simulator.worker import Role, SimulatedWorker

FLIP_SECONDS = 1.0
"""Time that an idle worker takes to change its role, in seconds. It keeps its weights."""

_SLICES = 10
"""Number of groups of workers whose heartbeats come one after another."""


class SimulatedFleet:
    """Owns the workers and hosts of a simulation, and adds up their costs.

    Args:
        goes_on: returns whether the simulation has more to do. When it returns False, heartbeats end.
    """

    def __init__(
        self,
        scenario: Scenario,
        profile: Profile,
        block_tokens: int,
        events: Events,
        gateway: SimulatedGateway,
        hints: BlockHolders,
        goes_on: Callable[[], bool],
    ) -> None:
        self.workers: dict[str, SimulatedWorker] = {}
        self._residents: dict[Host, list[SimulatedWorker]] = defaultdict(list)
        """The workers of each host that have not ended."""
        self.hosts: list[Host] = []
        self.device_seconds = 0.0
        self.cost = 0.0
        self._scenario, self._profile, self._block_tokens = scenario, profile, block_tokens
        self._events, self._gateway, self._hints, self._goes_on = events, gateway, hints, goes_on
        self._policy = find_policy(scenario.cache_policy)
        self._random = random.Random(scenario.seed + 2)
        self._count = 0
        self._paid_until = 0.0
        self._cores: dict[int, Cores] = {}
        self._kits: dict[Role, Kit] = {
            "prefill": _kit(profile.prefill, scenario.seed),
            "decode": _kit(profile.decode, scenario.seed),
        }

    def begin(self) -> None:
        """Make all workers of the scenario ready, and start their heartbeats and hints."""
        scenario = self._scenario
        if scenario.is_aggregated:
            roles: list[Role] = ["decode"] * (scenario.prefill + scenario.decode)
        else:
            # Both roles are spread over the hosts in the same proportion.
            places = [((i + 0.5) / scenario.prefill, "prefill") for i in range(scenario.prefill)]
            places += [((i + 0.5) / scenario.decode, "decode") for i in range(scenario.decode)]
            roles = [role for _, role in sorted(places)]  # type: ignore[misc]
        for role in roles:
            self._ready(self._make(role))
        for failure in scenario.failures:
            self._events.at(failure.at, self._fail, failure.share)
        self._beat(0)
        self._publish()

    # ---- changes

    def add(self, role: Role) -> SimulatedWorker:
        """Start a worker, which is ready after its startup time."""
        worker = self._make(role)
        self._events.after(worker.kit.times.startup, self._ready, worker)
        return worker

    def drain(self, worker: SimulatedWorker, to: Role | None = None) -> None:
        """Move a worker's requests away. Then end the worker, or let it take the role `to`."""
        if worker.state == "ready":
            worker.state, worker.since = "draining", self._events.now
            self._gateway.drain(worker)
            self._await_idle(worker, to)

    def count(self, role: Role) -> int:
        """Return the number of workers of a role that are starting or ready."""
        return sum(worker.role == role and worker.state in ("starting", "ready") for worker in self.workers.values())

    def times(self, role: Role) -> WorkerTimes:
        """Return the measured startup, drain and flip times of a role."""
        return self._kits[role].times

    def _make(self, role: Role) -> SimulatedWorker:
        self.pay()
        host = (
            next((host_number for host_number in reversed(self.hosts) if self._has_place(host_number, role)), None)
            or self._add_host()
        )
        cores = self._cores.get(host.number)
        is_coalesced, adapters = self._scenario.is_coalesced, self._scenario.adapters
        worker = SimulatedWorker(
            self._count, role, host, self._kits, self._events, self._gateway.attempts, cores, is_coalesced, adapters
        )
        self._count += 1
        self.workers[worker.name] = worker
        self._residents[host].append(worker)
        return worker

    def count_residents(self, host: Host) -> int:
        """Return the number of workers on a host that have not ended."""
        return len(self._residents[host])

    def _has_place(self, host: Host, role: Role) -> bool:
        if self._profile.turns is not None:  # as measured: one worker of each role shares the cores of its host
            return all(resident.role != role for resident in self._residents[host])
        return len(self._residents[host]) < self._scenario.workers_per_host

    def _add_host(self) -> Host:
        host = Host(len(self.hosts), self._profile, self._block_tokens, self._policy, self._hints)
        self.hosts.append(host)
        if self._profile.turns is not None:
            self._cores[host.number] = Cores(self._profile.turns, self._events, self._scenario.seed + host.number)
        return host

    def _ready(self, worker: SimulatedWorker) -> None:
        if worker.state != "gone":
            worker.state, worker.since = "ready", self._events.now
            self._gateway.join(worker)

    def _await_idle(self, worker: SimulatedWorker, to: Role | None) -> None:
        if worker.state == "gone":
            return
        if worker.admitted or worker.has_work:
            self._events.after(0.1, self._await_idle, worker, to)
        elif to is None:
            self._events.after(worker.kit.times.drain, self._end, worker)
        else:
            self._events.after(FLIP_SECONDS, self._flip, worker, to)

    def _flip(self, worker: SimulatedWorker, to: Role) -> None:
        if worker.state != "gone":
            self.pay()
            self._gateway.known.forget(worker)
            worker.take_role(to)
            self._ready(worker)

    def _end(self, worker: SimulatedWorker) -> None:
        """End a worker that has no work, and remove it from the fleet."""
        if worker.state != "gone":
            self.pay()
            worker.stop()
            worker.state = "gone"
            self._residents[worker.host].remove(worker)
            del self.workers[worker.name]
            self._gateway.known.forget(worker)

    def _fail(self, share: float) -> None:
        """End a share of all workers at once. Each is started again if the scenario restarts workers."""
        self.pay()
        alive = list(self.workers.values())
        for worker in self._random.sample(alive, round(len(alive) * share)):
            was_known, role = worker.state in ("ready", "draining"), worker.role
            worker.state = "gone"
            self._residents[worker.host].remove(worker)
            del self.workers[worker.name]
            if was_known:
                self._gateway.lose(worker)
            if self._scenario.restarts:
                self.add(role)
        self._gateway.waiting.is_hopeless = not (self._scenario.plans or self.count("decode"))

    # ---- what comes again and again

    def _beat(self, part: int) -> None:
        """Send the heartbeats of a part of the workers."""
        for worker in list(self.workers.values())[part::_SLICES]:
            if worker.state == "ready":
                self._gateway.known.hear(worker)
        if self._goes_on():
            self._events.after(self._scenario.heartbeat_seconds / _SLICES, self._beat, (part + 1) % _SLICES)

    def _publish(self) -> None:
        for host in self.hosts:
            host.publish()
        if self._goes_on():
            self._events.after(self._scenario.hint_seconds, self._publish)

    def pay(self) -> None:
        """Add the costs since the last call to the totals."""
        seconds, self._paid_until = self._events.now - self._paid_until, self._events.now
        if seconds:
            devices, hourly_cost = self.expenses()
            self.device_seconds += seconds * devices
            self.cost += seconds * hourly_cost / 3600

    def expenses(self) -> tuple[float, float]:
        """Return the number of devices that all workers occupy, and the cost of these devices for an hour."""
        devices = [(self._devices(worker), worker.kit.times.hourly_cost) for worker in self.workers.values()]
        return math.fsum(count for count, _ in devices), math.fsum(count * price for count, price in devices)

    def _devices(self, worker: SimulatedWorker) -> float:
        sharing = 1 if self._profile.turns is None else self.count_residents(worker.host)
        return worker.kit.times.devices / sharing


def _kit(times: WorkerTimes, seed: int) -> Kit:
    prompts, decoding = times.steps.prefill_spread, times.steps.decode_spread
    return Kit(times, ratios_of(prompts, seed), ratios_of(decoding, seed + 1), Yields(times.drafts, seed))
