"""The planner's input: workers of the fleet and traffic of an interval. Plain values with JSON both ways.

All durations are in seconds. A report has one instant, `at`, on a clock of the planner's service; everything else is a
duration up to that instant, because services send durations to each other and never instants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.core.planner.distribution import Distribution

Role = Literal["prefill", "decode", "encode", "pool"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "encode", "pool")
State = Literal["starting", "ready", "draining", "sleeping"]


@dataclass(frozen=True, slots=True)
class Steps:
    """Statistics of one worker's steps with about the same load, since the worker's previous report. The planner fits
    step times to these statistics.
    """

    tokens: float
    """Mean number of tokens that a step computed: tokens of prompts, and one or more for each decoding sequence."""
    context: float
    """Mean number of tokens whose KV a step read, over all of its sequences."""
    seconds: Distribution
    """Times of the steps, in seconds."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker, as its latest report describes it."""

    worker: str
    """Name of the worker. It stays the same when the worker changes its role."""
    role: Role
    host: str = ""
    state: State = "ready"
    state_seconds: float = 0.0
    """Seconds since the worker entered this state."""
    age: float = 0.0
    """Age of the worker's own report, in seconds. An old report says nothing about the present load."""
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    """Number of prompt tokens that the worker has accepted and not computed yet."""
    max_seqs: int = 1
    """Largest number of requests that the worker runs at the same time."""
    kv_pressure: float = 0.0
    """Share of the worker's KV memory that running requests use, from 0 to 1."""
    kv_tokens: int = 0
    """Number of tokens that the worker's KV memory holds; 0 if unknown."""
    shares_memory: bool = False
    """Whether a further worker would only share this worker's KV memory. Then `kv_tokens` is 0, because the memory does
    not limit a single worker.
    """
    flips_to: tuple[Role, ...] = ()
    """Roles that the worker can take without a restart."""
    loss: float = 0.0
    """Number of tokens that would have to be computed again if this worker ended. The worker with the least loss leaves
    first.
    """
    steps: tuple[Steps, ...] = ()


@dataclass(frozen=True, slots=True)
class RoleReport:
    """One role as the platform sees it."""

    wanted: int = 0
    """Number of workers that the platform tries to have: the target of the newest change by anybody."""
    pinned: int | None = None
    """Number of workers that a person has set; None if nobody has. It takes precedence over every decision until the
    person releases it.
    """
    grown_seconds: float | None = None
    """Seconds since a planner's decision raised `wanted`; None if no decision did, or if this is unknown. It lets a
    planner that has not seen the change avoid reversing it.
    """
    shrunk_seconds: float | None = None
    """Seconds since a planner's decision lowered `wanted`; None if no decision did, or if this is unknown."""
    startup_seconds: float = 60.0
    """Seconds from the decision to add a worker until it is ready: a high percentile of recent starts, or an
    estimate."""
    drain_seconds: float = 30.0
    """Seconds from the start of a drain until the worker has ended: a high percentile, or an estimate."""
    flip_seconds: float = 5.0
    """Seconds from the start of a flip away from this role until the worker is ready in its new role."""
    shares_cores: bool = False
    """Whether a further worker would only share the cores of the present workers. True if no worker was seen yet."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of one class in all gateways, in one interval."""

    seconds: float
    """Length of the interval, in seconds."""
    arrivals: int = 0
    finished: int = 0
    refused: int = 0
    """Number of requests that were rejected because there was no room."""
    waiting: int = 0
    """Number of requests that wait for a worker now, at the end of the interval."""
    oldest_wait: float = 0.0
    """Seconds for which the request that has waited longest has waited."""
    prompt_tokens: Distribution = field(default_factory=Distribution)
    """Lengths of the prompts that arrived, in tokens."""
    cached_tokens: int = 0
    """Number of tokens of started prompts that were found in caches."""
    started_tokens: int = 0
    """Number of tokens of all prompts that were started. `cached_tokens` are a part of them."""
    answer_tokens: Distribution = field(default_factory=Distribution)
    """Lengths of the answers that ended, in tokens."""
    media_items: int = 0
    """Number of images, frames and pieces of audio that arrived."""
    ttft: Distribution = field(default_factory=Distribution)
    """Times to first token, in seconds, of requests that got their first token in this interval."""
    itl: Distribution = field(default_factory=Distribution)
    """Times between tokens, in seconds; one value for each token."""


@dataclass(frozen=True, slots=True)
class Report:
    """All inputs of a decision."""

    at: float
    """Instant of this report, in seconds on a clock that never goes back."""
    revision: str
    """Revision of the platform's targets, pins and roles when they were read. It changes whenever anybody changes them.
    A platform carries out a decision only if this is still its revision.
    """
    workers: tuple[WorkerReport, ...]
    roles: Mapping[Role, RoleReport]
    """The present state of every role that this fleet may have."""
    traffic: Mapping[str, Traffic]
    """The requests of the last interval, by their class."""
    traffic_age: float = 0.0
    """Age of the oldest figures of any gateway, in seconds. It is large if a gateway does not answer."""
    gateways_lost: int = 0
    """Number of member gateways whose figures are missing."""

    @property
    def first_role(self) -> Role:
        """The role without which no request begins: decode in a fleet that generates text. A model that is an encoder
        has pool workers alone, and a causal model that only pools has prefill workers.
        """
        order: tuple[Role, ...] = ("pool", "decode", "prefill")
        return next((role for role in order if role in self.roles), "decode")
