"""The content of a simulation's report, as plain values that are written as JSON.

Times are in seconds. A percentile of no values, and a value that does not exist at an instant, is None.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ReportPercentiles(_Value):
    """Percentiles of a time in seconds, over requests or over tokens."""

    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


class ShownClass(_Value):
    """Counts and times of the requests of one class."""

    requests: int
    finished: int
    refused: int = 0
    """Requests that found no room in time, or whose attempts all failed."""
    refusals: dict[str, int] = Field(default_factory=dict)
    """Number of refused requests by reason, such as "timeout" or "overload"."""
    ttft: ReportPercentiles = ReportPercentiles()
    """Time from the arrival to the first token."""
    itl: ReportPercentiles = ReportPercentiles()
    """Time between two tokens, over all tokens of the class."""
    total: ReportPercentiles = ReportPercentiles()
    """Time from the arrival to the last token."""
    ttft_objective: float | None = None
    itl_objective: float | None = None
    within: float | None = None
    """Share of the requests that met their objectives; None without objectives."""
    goodput: float = 0.0
    """Requests per second that met their objectives."""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens that were found in caches."""


class ReportSeries(_Value):
    """Values over time."""

    at: tuple[float, ...] = ()
    """Instants in seconds from the beginning of the trace, in order: the ends of equal intervals."""
    values: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)
    """Values by the names that report.js draws, one for each instant. Any name may be missing.

    arrivals: requests per second. waiting, running: requests. prefill, decode: ready workers. changing: workers that
    start or drain. devices: number in use. cost: price of the devices for an hour. within: share of the requests that
    met their objectives. hit_rate: share of prompt tokens found in caches. kv_usage: share of KV memory that requests
    use. ttft_p50, ttft_p99, itl_p50, itl_p99: seconds.
    """

    @model_validator(mode="after")
    def _check(self) -> ReportSeries:
        if any(len(column) != len(self.at) for column in self.values.values()):
            raise ValueError("every column of a series needs one value for each instant")
        return self


class ShownDecision(_Value):
    """A decision of the planner that changed the fleet, and its effect."""

    at: float
    line: str
    """The planner's reason, in one line of text."""
    actions: tuple[str, ...] = ()
    """The actions in words, such as "add prefill: 3"."""
    effect: str = ""
    """The effect in words, such as "ready after 61 s; TTFT p99 4.10 s before, 1.20 s after"."""


class ShownSimulation(_Value):
    """One simulation: the fleet, the load, and the results."""

    name: str
    """Name of the simulated fleet, in a few words."""
    load: str
    """The trace or the described load, in words."""
    profile: str
    """Names of the machine and the model of the profile."""
    fleet: str
    """The fleet at the beginning, and the way in which it was scaled."""
    seconds: float
    """Simulated time in seconds."""
    classes: dict[str, ShownClass]
    """Results by the name of the class; "" stands for all requests together."""
    device_seconds: float = 0.0
    cost: float = 0.0
    """Price of all devices, in the currency of the profile."""
    hit_rate: float | None = None
    """Share of prompt tokens that were found in caches."""
    series: tuple[ReportSeries, ...] = ()
    """Values over time. Each name of a value is in exactly one series."""
    decisions: tuple[ShownDecision, ...] = ()
    notes: tuple[str, ...] = ()
    """Conclusions in sentences, such as whether disaggregation pays for this load."""


class SimulationReport(_Value):
    """Simulations of one load that are compared with each other."""

    simulations: tuple[ShownSimulation, ...] = Field(min_length=1)
    """The simulations: first the requested one, then its alternatives."""
    notes: tuple[str, ...] = ()
    """Sentences about the results of the comparison."""

    def to_json(self) -> str:
        return self.model_dump_json(indent=1)
