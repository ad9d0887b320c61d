"""The command `paceline profile`: measures a running stack and writes its profile, for the simulator."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from paceline.client import GatewayClient
from paceline.core.errors import ConfigError, InvalidRequestError, UnavailableError
from paceline.core.step_record import StepRecord
from paceline.core.step_times import Drafts, Profile, StepTimes, TurnTimes, WorkerTimes
from paceline.profiler.fit import LEAST_STEPS, Quality, fit_steps, with_gaps
from paceline.profiler.measure import Measured, measure
from paceline.profiler.overheads import find_admission, find_admit, find_lateness, find_overheads
from paceline.profiler.stack import Facts, ProfiledStack
from paceline.profiler.turns import MeasuredArrivals, find_arrival, find_turns

SCALE_SECONDS = 600.0
"""Deadline of a worker's start, and of its drain, in seconds."""
_POLL_SECONDS = 0.25


class Lifetimes(NamedTuple):
    """The times that a worker needs to start and to drain, in seconds."""

    startup: float = 60.0
    drain: float = 30.0


def profile(gateway: GatewayClient, output: Path, machine: str, scales: bool) -> None:
    """Measure a running stack, which must have no other requests, and write its profile.

    Args:
        machine: name of the machine in the profile; "" uses the numerics that the workers report.
        scales: whether to start and drain one more decode worker, to measure how long that takes.

    Raises:
        ConfigError: the file cannot be written.
        InvalidRequestError: the stack refuses a request.
        UnavailableError: the stack has other requests, or does not answer.
    """
    if not output.parent.is_dir():
        raise ConfigError(f"there is no folder {output.parent} for the profile")
    stack = ProfiledStack(gateway)
    facts = stack.facts()
    began = time.monotonic()
    _tell(f"measuring {facts.model} on {_described(facts.workers)}; do not use the stack meanwhile")
    measured = measure(stack, facts, _tell)
    lifetimes = _lifetimes(stack) if scales else Lifetimes()
    learned, quality = make_profile(facts, measured, lifetimes, stack.fetched(), machine)
    try:
        output.write_text(learned.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from error
    for name, found in quality.items():
        print(f"{name}: {found}")
    print(f"wrote {output} after {time.monotonic() - began:.0f} s")


def make_profile(
    facts: Facts, measured: Measured, lifetimes: Lifetimes, fetched: tuple[int, float], machine: str = ""
) -> tuple[Profile, dict[str, Quality]]:
    """Return the profile from the measurements, and the quality of its fits. Raises UnavailableError if steps are
    missing.

    Args:
        fetched: bytes that hosts have fetched from each other, and the seconds that this took.
    """
    computing = "prefill" if facts.workers["prefill"] else "decode"
    prefill, quality = _steps_of(computing, measured)
    decode, decode_quality = _steps_of("decode", measured)
    turns = _turns(facts, measured, prefill, decode)
    lateness = _lateness(facts, measured)
    overheads = find_overheads(measured.singles, measured.texts, decode.decode_seconds(1, 0), lateness)
    shared = WorkerTimes(
        steps=decode,
        max_seqs=facts.max_seqs,
        max_batched_tokens=facts.max_batched_tokens,
        drafts=Drafts(),
        join=overheads.decode_join,
        arrival=_arrival(computing, facts, measured, prefill, turns),
        startup=lifetimes.startup,
        drain=lifetimes.drain,
    )
    moved, seconds = fetched
    made = Profile(
        machine=machine or facts.numerics or "unknown",
        model=facts.model,
        version=facts.version,
        max_model_len=facts.max_model_len,
        token_bytes=facts.token_bytes,
        host_tokens=facts.host_tokens,
        prefill=shared.model_copy(update={"steps": prefill, "join": overheads.prefill_join}),
        decode=shared,
        gateway=overheads.gateway,
        admit=overheads.admit,
        first_token=overheads.first_token,
        handoff=overheads.handoff,
        token=overheads.token,
    )
    if facts.takes_turns:
        # A decode worker that takes turns plans each step just before the step begins.
        planned = 0 if facts.workers["prefill"] else 1
        alternating = shared.model_copy(update={"planned_steps": planned})
        made = made.model_copy(update={"decode": alternating, "turns": turns})
    if moved and seconds:
        made = made.model_copy(update={"transfer_bytes": moved / seconds})
    return made, {f"steps of {name}": each for name, each in (quality | decode_quality).items()}


def _lateness(facts: Facts, measured: Measured) -> list[float]:
    """Return the lateness of tokens, in seconds; empty with several workers, because their steps do not show
    lateness.
    """
    if facts.workers["decode"] > 1:
        return []
    answers = [answer for answer, _ in measured.singles]
    return find_lateness(answers, measured.decoding["decode"])  # singles came first, so the first steps are theirs


def _turns(facts: Facts, measured: Measured, prefill: StepTimes, decode: StepTimes) -> TurnTimes:
    prompts = [row for row in measured.beside["prefill"] if row.prompt_tokens]
    decoding = [row for row in measured.beside["decode"] if row.sequences and not row.prompt_tokens]
    found = find_turns(facts.itl_target_seconds, prompts, decoding, prefill, decode)
    singles = measured.singles
    times: dict[str, object] = {"admission": find_admission(singles, [group for group, _ in measured.arrivals])}
    if prompts and decoding:
        step = statistics.median(row.seconds for row in decoding)
        times["admit"] = find_admit(singles, measured.crowded, step)
    return found.model_copy(update=times)


def _arrival(role: str, facts: Facts, measured: Measured, steps: StepTimes, turns: TurnTimes) -> float:
    """Return the seconds that an arrival costs the prompts under way; 0 with several workers, whose steps do not show
    it.
    """
    if facts.workers[role] > 1:
        return 0.0
    arrivals = [
        MeasuredArrivals(
            len(group),
            [row for row in rows[role] if row.prompt_tokens],
            [row for row in rows["decode"] if facts.takes_turns and role == "prefill"],
        )
        for group, rows in measured.arrivals
    ]
    return find_arrival(arrivals, steps, turns)


def _steps_of(role: str, measured: Measured) -> tuple[StepTimes, dict[str, Quality]]:
    """Return the step times of a role. For sizes that its workers seldom computed, the other role's steps count, too.

    For example, decode workers compute short prompts, and prefill workers long ones.
    """

    def rows(steps: dict[str, list[StepRecord]]) -> list[StepRecord]:
        measured, others = with_gaps(steps[role]), with_gaps(steps["prefill" if role == "decode" else "decode"])
        computed = Counter(map(_size, measured))
        # The fit leaves out one step of four.
        return measured + [row for row in others if computed[_size(row)] <= LEAST_STEPS]

    prompts, decoding = rows(measured.prompts), rows(measured.decoding)
    if not prompts or not decoding:
        raise UnavailableError("the workers do not tell their steps; are they of this release?")
    return fit_steps(prompts, decoding, measured.mixed[role])


def _size(row: StepRecord) -> int:
    """Return the prompt tokens of a step, or the rows of a step without any."""
    return row.prompt_tokens or row.sequences + row.drafts


def _lifetimes(stack: ProfiledStack) -> Lifetimes:
    """Start one more decode worker and drain it. Without a supervisor, return estimates."""
    try:
        before = stack.scale()["decode"]["wanted"]
    except InvalidRequestError as error:
        _tell(f"startup and drain are not measured, and are estimates: {error}")
        return Lifetimes()
    _tell("a further decode worker, to measure its start and its drain")
    began = time.monotonic()
    stack.scale({"decode": before + 1})
    try:
        startup = _until(stack, lambda role: role["ready"] > before, began)
    finally:
        began = time.monotonic()
        stack.scale({"decode": before})
    return Lifetimes(startup, _until(stack, lambda role: role["ready"] <= before and not role["draining"], began))


def _until(stack: ProfiledStack, is_reached: Callable[[dict[str, int]], bool], began: float) -> float:
    """Wait until `is_reached` accepts the state of the decode workers, and return the seconds since `began`. Raises
    UnavailableError.
    """
    while not is_reached(stack.scale()["decode"]):
        if time.monotonic() - began > SCALE_SECONDS:
            raise UnavailableError(f"a decode worker has not started or ended within {SCALE_SECONDS:g} seconds")
        time.sleep(_POLL_SECONDS)
    return time.monotonic() - began


def _described(workers: dict[str, int]) -> str:
    return " and ".join(f"{count} {role} worker{'s' * (count != 1)}" for role, count in workers.items() if count)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
