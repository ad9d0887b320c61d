"""The measured times of one machine and one model, as plain values that are stored as JSON.

`paceline profile` fits them to a running stack. The simulator takes the time of every step, transfer and start from
them. A time is a fitted function of the work, multiplied by a ratio that is drawn from the measured distribution of
(measured time / fitted time). So simulated percentiles include the machine's slow steps, and not only its means.

All times are in seconds, and all lengths in tokens.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.core.errors import ConfigError
from paceline.core.turns import BACKLOG_SHARE, left_to_prefill

FORMAT: Literal[2] = 2

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1)]
Chance = Annotated[float, Field(ge=0, le=1)]


_LEAST_SPEED = 0.1
"""Least speed of prefill in its turns, relative to its speed alone, however busy the cores are."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class Curve(_Value):
    """A function that is linear between measured points.

    Before the first point, the curve has the first point's value. After the last point, it continues with the last
    slope.
    """

    points: tuple[tuple[float, Seconds], ...] = Field(min_length=1)
    """(amount of work, seconds), in ascending order of the work."""

    @field_validator("points")
    @classmethod
    def _ascend(cls, points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        if any(before[0] >= after[0] for before, after in itertools.pairwise(points)):
            raise ValueError("the points of a curve must be in ascending order of the work")
        return points

    def at(self, work: float) -> float:
        """Return the seconds for an amount of work."""
        points = self.points
        if work <= points[0][0] or len(points) == 1:
            return points[0][1]
        index = min(bisect.bisect_left(points, (work,)), len(points) - 1)
        (x0, y0), (x1, y1) = points[index - 1], points[index]
        return max(0.0, y0 + (y1 - y0) * (work - x0) / (x1 - x0))


class Spread(_Value):
    """The distribution of the ratio (measured time / fitted time)."""

    quantiles: tuple[Seconds, ...] = Field(default=(1.0,), min_length=1)
    """Ratios at evenly spaced levels from 0 to 1: the least one first, the median in the middle, the largest last."""

    @field_validator("quantiles")
    @classmethod
    def _ascend(cls, quantiles: tuple[float, ...]) -> tuple[float, ...]:
        if any(before > after for before, after in itertools.pairwise(quantiles)):
            raise ValueError("quantiles must be in ascending order")
        return quantiles

    def at(self, level: float) -> float:
        """Return the quantile of the ratios at `level`, which is in [0, 1]."""
        place = level * (len(self.quantiles) - 1)
        index = min(int(place), len(self.quantiles) - 2)
        if index < 0:
            return self.quantiles[0]
        low, high = self.quantiles[index], self.quantiles[index + 1]
        return low + (high - low) * (place - index)


class Delay(_Value):
    """A time that is constant, or grows with a number of tokens."""

    seconds: Seconds = 0.0
    per_token: Seconds = 0.0
    spread: Spread = Spread()

    def at(self, tokens: float, level: float) -> float:
        """Return the seconds for a number of tokens, at `level` of the distribution, from 0 (shortest) to 1
        (longest).
        """
        return (self.seconds + self.per_token * tokens) * self.spread.at(level)


class StepTimes(_Value):
    """The time that the model takes for one step, without the work around the step.

    A step without prompts takes the time of `decode` for its rows. A step with prompts takes the time of `prefill` for
    its prompt tokens. The time of attention is added to both; it is linear in the number of positions that are read. A
    mixed step takes the sum of both times minus `shared`, because it reads the weights once.
    """

    prefill: Curve
    """Seconds of a step by its number of prompt tokens, without attention to earlier tokens."""
    prefill_pair: Seconds = 0.0
    """Seconds for each pair of a prompt token and a token before it: a chunk of n tokens after c others has
    n * (c + n / 2) pairs."""
    decode: Curve
    """Seconds of a step by its number of rows: decoding sequences plus the draft tokens that the step verifies for
    them.
    """
    decode_context: Seconds = 0.0
    """Seconds that each token in the context of a decoding sequence adds to a step."""
    shared: Seconds = 0.0
    """Seconds that a mixed step, with prompts and decoding sequences, saves compared to two steps."""
    draft: Seconds = 0.0
    """Seconds to draft one token for one sequence."""
    prefill_spread: Spread = Spread()
    """Distribution of (measured time / fitted time) of steps with prompts."""
    decode_spread: Spread = Spread()
    """Distribution of (measured time / fitted time) of steps without prompts."""

    def prefill_seconds(self, tokens: int, pairs: float) -> float:
        """Return the fitted seconds for the prompts in a step; 0 if the step has no prompts."""
        return self.prefill.at(tokens) + self.prefill_pair * pairs if tokens else 0.0

    def decode_seconds(self, rows: float, context: float, drafts: float = 0.0) -> float:
        """Return the fitted seconds for the decoding sequences in a step; 0 if the step has no such sequences.

        Args:
            rows: sequences and their drafts.
            context: tokens of context of all sequences together.
            drafts: tokens that the step drafts for the next one.
        """
        return self.decode.at(rows) + self.decode_context * context + self.draft * drafts if rows else 0.0

    def mixed_seconds(self, tokens: int, pairs: float, rows: float, context: float, drafts: float = 0.0) -> float:
        """Return the fitted seconds of a step with prompts. The step may have decoding sequences, too."""
        prompts, decoding = self.prefill_seconds(tokens, pairs), self.decode_seconds(rows, context, drafts)
        return max(prompts, decoding, prompts + decoding - self.shared) if prompts and decoding else prompts + decoding


class Drafts(_Value):
    """The number of draft tokens per step, and the probabilities that they are accepted."""

    most: int = Field(default=0, ge=0)
    """Largest number of draft tokens of one sequence in a step; 0 without speculation."""
    accepted: tuple[Chance, ...] = ()
    """For each j, the probability that a step's j-th draft is accepted if all drafts before it are."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if len(self.accepted) != self.most:
            raise ValueError(f"{self.most} drafts need as many chances, not {len(self.accepted)}")
        return self


class WorkerTimes(_Value):
    """The measured times of the workers of one role."""

    steps: StepTimes
    max_seqs: Tokens = 32
    max_batched_tokens: Tokens = 2048
    drafts: Drafts = Drafts()
    planned_steps: int = Field(default=1, ge=0, le=1)
    """Number of steps that are already planned while a step is computed. Work that arrives now cannot join them. 0 for
    a decode worker that takes turns on shared cores, because it plans each step just before the step begins.
    """
    arrival: Seconds = 0.0
    """Seconds by which a prompt that is being computed takes longer with each further request that arrives, because
    the services that admit the request and hand it over use the same cores."""
    join: Delay = Delay()
    """Time from the message that begins a prompt on a worker, or hands one over to it, until a step can include it."""
    startup: Seconds = 60.0
    """Time from the start of a worker's process until it is ready."""
    drain: Seconds = 30.0
    """Time from the start of an idle worker's drain until it has ended."""
    devices: float = Field(default=1.0, gt=0)
    """Number of devices that a worker occupies."""
    hourly_cost: float = Field(default=1.0, ge=0)
    """Price of one device for an hour, in any currency."""


class TurnTimes(_Value):
    """Turns of the workers of one host that share its cores: a decode worker computes when it has work, and leaves
    prefill some time after each of its steps (`core/turns.py`)."""

    itl_target: Seconds = 0.028
    """Target time between tokens. Prefill gets the part of it that a decode step leaves."""
    least_share: float = Field(default=1.5, gt=0)
    """Prefill gets at least this time for each second of decoding."""
    backlog_share: float = Field(default=BACKLOG_SHARE, gt=0)
    """Value of `least_share` while there is a backlog of prompts."""
    prefill_speed: Curve = Curve(points=((1, 1.0),))
    """Speed of prefill in its turns, relative to its speed alone, by the number of rows that decode. It is above 1 if
    prefill also computes while decode leaves the cores idle. It is below 1 if sending tokens to clients uses the cores,
    too.
    """
    decode: Curve | None = None
    """Seconds of a decode step while prefill has work, by its number of rows, without attention to contexts; None if it
    takes as long as without prefill.
    """
    decode_per_token: Seconds = 0.0
    """Seconds by which a decode step takes longer for each token of prefill's step, because it waits until prefill's
    operation ends.
    """
    decode_spread: Spread = Spread()
    """Distribution of (measured time / fitted time) of decode steps while prefill has work."""
    late: Delay = Delay()
    """Time from the end of prefill's turn until the next decode step begins."""
    admit: Delay = Delay()
    """Additional time of everything around the steps of a prompt while decode workers of the same cores have work."""
    admission: Seconds = 0.0
    """Seconds of work on these cores for one admission. Each of several simultaneous admissions takes longer by this
    time for every other one.
    """

    def speed_of_prefill(self, rows: int) -> float:
        """Return the speed of prefill in its turns while `rows` rows decode, relative to its speed alone; 1 if `rows`
        is 0.
        """
        points = self.prefill_speed.points
        return max(_LEAST_SPEED, self.prefill_speed.at(min(rows, points[-1][0]))) if rows else 1.0

    def left_to_prefill(self, recent: Collection[float], wanted_seconds: float = 0.0) -> float:
        """Return the seconds that a decode worker leaves to prefill after a step, by `core.turns.left_to_prefill`."""
        return left_to_prefill(self.itl_target, self.least_share, self.backlog_share, recent, wanted_seconds)


class Profile(_Value):
    """Everything that was measured of a stack on one machine."""

    format: Literal[2] = FORMAT
    machine: str
    """Name of the machine, such as its processor or its GPU."""
    model: str
    version: str = ""
    """Paceline's version at the time of the measurement; empty if unknown."""
    max_model_len: Tokens = 131_072
    token_bytes: float = Field(gt=0)
    """Number of bytes of KV that one token takes."""
    host_tokens: Tokens = 1 << 20
    """Number of tokens whose KV fits into the arena of one host."""
    prefill: WorkerTimes
    decode: WorkerTimes
    """Times of decode workers. In a fleet that is not disaggregated, they are the times of all workers."""
    turns: TurnTimes | None = None
    """Turns of workers that share cores; None if every worker has a device, or cores, of its own."""
    gateway: Delay = Delay()
    """Time for tokenizing and hashing in the gateway, from a request's arrival until its placement, by prompt
    tokens.
    """
    admit: Delay = Delay()
    """Time from the placement until the decode worker has admitted the request."""
    first_token: Delay = Delay()
    """Time from the end of the prompt's last step until the client has the first token."""
    handoff: Delay = Delay()
    """Time from the end of the prompt's last step until the decode worker on the same host has the request."""
    token: Delay = Delay()
    """Time from the end of a decode step until clients have its tokens."""
    transfer_seconds: Seconds = 0.01
    """Time that a transfer between hosts takes in addition to the time for its bytes."""
    transfer_bytes: float = Field(default=1e9, gt=0)
    """Bytes per second that a host can receive from other hosts."""

    def to_json(self) -> str:
        """Return the profile as indented JSON."""
        return self.model_dump_json(indent=1)

    @staticmethod
    def from_json(text: str | bytes, name: str = "profile") -> Profile:
        """Return the profile of a JSON text. Raises ConfigError, which names the field that is wrong.

        Args:
            name: name of the text for errors, such as its file.
        """
        try:
            return Profile.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            advice = "paceline profile writes such files"
            raise ConfigError(
                f"{name} is not a profile: {place + ': ' if place else ''}{first['msg']}; {advice}"
            ) from None


def read_profile(path: Path) -> Profile:
    """Read a profile from a file of JSON. Raises ConfigError if the file cannot be read or is not valid."""
    try:
        return Profile.from_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
