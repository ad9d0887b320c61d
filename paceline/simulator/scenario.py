"""The scenario of a simulation: a fleet, its options, and the events that happen to it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from paceline.core.errors import ConfigError
from paceline.core.planner.objectives import Objectives
from paceline.core.step_times import Profile
from paceline.simulator.adapters import AdapterOptions
from paceline.simulator.gateway import GatewayOptions


@dataclass(frozen=True, slots=True)
class PlannedFailure:
    """A share of all workers ends at once, without a drain."""

    at: float
    """Instant of the failure, in seconds since the start of the simulation."""
    share: float
    """Share of the workers that fail, from 0 to 1."""

    @staticmethod
    def parse(text: str) -> PlannedFailure:
        """Return the failure that `SHARE@SECONDS` describes, such as 0.33@600. Raises ConfigError."""
        share, _, at = text.partition("@")
        try:
            found = PlannedFailure(float(at), float(share))
        except ValueError:
            raise ConfigError(f"--fail {text} is not SHARE@SECONDS, such as 0.33@600") from None
        if not (0 < found.share <= 1 and found.at >= 0):
            raise ConfigError(f"--fail {text}: the share must be above 0 and at most 1, the seconds at least 0")
        return found


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fleet with its options and failures. The load is not part of it."""

    profile: Profile
    prefill: int
    """Number of prefill workers at the beginning."""
    decode: int
    """Number of decode workers at the beginning."""
    objectives: Objectives = field(default_factory=Objectives)
    is_aggregated: bool = False
    """Whether all workers are alike, and each computes prompts and decodes."""
    workers_per_host: int = 8
    """Number of workers on one host. Ignored if the workers of the profile share cores, because a host then has one
    worker of each role."""
    cache_policy: str = "adaptive"
    host_tokens: int = 0
    """Tokens of KV that a host holds; 0 takes the number in the profile."""
    gateway: GatewayOptions = field(default_factory=GatewayOptions)
    adapters: AdapterOptions = field(default_factory=AdapterOptions)
    failures: tuple[PlannedFailure, ...] = ()
    restarts: bool = True
    """Whether workers that have failed are started again."""
    plans: bool = False
    """Whether a planner changes the numbers and roles of workers during the simulation."""
    hint_seconds: float = 0.5
    """Time after which the gateway learns of changes to the hosts' cached blocks, in seconds."""
    heartbeat_seconds: float = 1.0
    seed: int = 0
    is_coalesced: bool = True
    """Whether all steps between two changes are one event. This gives the same results in much less time."""

    @property
    def name(self) -> str:
        """Name of the fleet, in words: its numbers of workers, and its cache if that is not the profile's."""
        cache = f", {self.host_tokens:,} tokens of cache on each host" if self.host_tokens else ""
        if self.is_aggregated:
            return f"{self.prefill + self.decode} workers that compute prompts and decode{cache}"
        return f"{self.prefill} prefill and {self.decode} decode workers{cache}"

    def together(self) -> Scenario:
        """Return an aggregated fleet, whose workers are all alike, on the same number of devices."""
        shares = self.profile.turns is not None
        count = max(self.prefill, self.decode) if shares else self.prefill + self.decode
        return dataclasses.replace(self, prefill=0, decode=count, is_aggregated=True)

    def check(self) -> None:
        """Raise ConfigError if such a fleet is impossible."""
        if self.prefill < 0 or self.decode < 0 or (self.decode < 1 and not (self.is_aggregated and self.prefill)):
            raise ConfigError("a fleet needs at least one decode worker: --decode 1")
        if self.workers_per_host < 1:
            raise ConfigError("--per-host must be at least 1")
        if self.host_tokens < 0:
            raise ConfigError("--cache-tokens must be at least 0, which takes the profile's")
        if not self.gateway.queue_seconds >= 0:
            raise ConfigError("--queue-seconds must be at least 0")
        if self.gateway.max_waiting < 1 or self.gateway.retries < 0:
            raise ConfigError("--max-waiting must be at least 1, and --retries at least 0")
        if self.adapters.max_cpu_loras < 1 or not self.adapters.seconds >= 0:
            raise ConfigError("--max-cpu-loras must be at least 1, and --adapter-seconds at least 0")
        if self.hint_seconds <= 0 or self.heartbeat_seconds <= 0:
            raise ConfigError("the times of hints and heartbeats must be above 0")
        self.objectives.check()
