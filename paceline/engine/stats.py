"""Counters of a scheduler, and the log of its newest steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from paceline.core.metrics import CountHistogram, Family, Histogram, Sample, counted, samples_of
from paceline.core.step_loads import StepLoads
from paceline.core.step_record import StepRecord
from paceline.engine.step import Step, StepResult

KEPT = 4096
"""Number of steps that are kept: a minute's steps if each takes 15 ms."""

DRAFTS = Family("spec_decode_num_drafts", "Times that drafts of a request were verified")
DRAFT_TOKENS = Family("spec_decode_num_draft_tokens", "Draft tokens that were verified")
ACCEPTED_TOKENS = Family("spec_decode_num_accepted_tokens", "Draft tokens that were accepted")
ACCEPTED_BY_POSITION = Family("spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position")
PREEMPTIONS = Family("num_preemptions", "Requests that lost their blocks and had to compute them again")
SWAP_OUTS = Family("num_swap_outs", "Requests that were swapped out of a worker's pool")
SWAP_INS = Family("kv_swap_in_seconds", "Seconds until the blocks of a request were in a worker's pool", "histogram")
ITERATION_TOKENS = Family(
    "iteration_tokens", "Tokens of prompts that one step computes, and tokens that it generates", "histogram"
)
REQUEST_SECONDS = Family(
    "worker_request_step_seconds",
    "Time of steps, counted for each request in them; model: forward pass and logits; other: the rest",
)

ITERATION_BOUNDS = (1, *(8 * 2**power for power in range(12)))
"""Upper bounds of the buckets of the histogram ITERATION_TOKENS."""
MEASURED_TOKENS = 128
"""Least number of prompt tokens in a step from which the speed of prefill is measured."""


class StepLog:
    """A ring of the newest steps. One thread notes steps; any thread may read.

    Args:
        kept: largest number of steps that are kept.
    """

    def __init__(self, kept: int = KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self._ring: list[StepRecord | None] = [None] * kept
        self._noted = 0
        self._clock = clock

    def note(self, step: Step, result: StepResult) -> None:
        """Note a step that was computed. This must be fast, because the next step may wait for it."""
        prompt_tokens = prompt_pairs = sequences = drafts = context_tokens = 0
        for chunk, outcome in zip(step.chunks, result.chunks, strict=True):
            start, length = chunk.start, chunk.length
            if not chunk.follows:
                prompt_tokens += length
                prompt_pairs += length * start + length * (length + 1) // 2
            elif outcome.tokens:  # otherwise the context has ended, and nothing is computed
                sequences += 1
                drafts += outcome.drafted
                context_tokens += start + length
        what = prompt_tokens, prompt_pairs, sequences, drafts, context_tokens
        number = self._noted
        self._ring[number % len(self._ring)] = StepRecord(number, self._clock(), result.seconds, *what)
        self._noted = number + 1

    def newest(self, most: int) -> list[StepRecord]:
        """Return at most `most` of the newest steps, in order."""
        known = sorted(record for record in self._ring.copy() if record is not None)
        return known[-most:] if most > 0 else []


@dataclass(slots=True)
class SchedulerStats:
    """Counters of a scheduler since its start."""

    steps: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    """Number of computed prompt tokens. A token that is computed again counts again."""
    sampled_tokens: int = 0
    drafts: int = counted(DRAFTS)
    """Number of times that a step verified drafts of a request: one for each request and step."""
    draft_tokens: int = counted(DRAFT_TOKENS)
    accepted_tokens: int = counted(ACCEPTED_TOKENS)
    accepted_by_position: list[int] = field(default_factory=list)
    """For each place among the drafts of a step, the number of times that the draft at this place was accepted."""
    preemptions: int = counted(PREEMPTIONS)
    swap_outs: int = counted(SWAP_OUTS)
    """Number of swap-outs, each of which moves a request's blocks from the device's pool to the arena until there is
    room again.
    """
    loaded_blocks: int = 0
    """Number of blocks copied from the arena into the device's pool."""
    device_blocks: int = 0
    """Number of blocks copied from another worker's pool on the same device."""
    stored_blocks: int = 0
    """Number of blocks copied from the device's pool into the arena."""
    swap_ins: Histogram = field(default_factory=lambda: Histogram("swap_in", SWAP_INS, (1, 2, 5, 10, 20, 50, 100)))
    """Seconds from the reservation of slots in the pool until the blocks were copied into them."""
    iteration_tokens: CountHistogram = field(default_factory=lambda: CountHistogram(ITERATION_TOKENS, ITERATION_BOUNDS))
    prefill_tokens_per_second: float = 0.0
    """Recent speed of prefill in steps with large chunks of prompts, in tokens per second; 0 before the first such
    step.
    """
    prefill_model_seconds: float = counted(REQUEST_SECONDS, phase="prefill", kind="model")
    """Seconds that the model took in steps with chunks of prompts. A step with n such chunks counts n times."""
    prefill_other_seconds: float = counted(REQUEST_SECONDS, phase="prefill", kind="other")
    """Seconds that steps with chunks of prompts took outside of the model (inputs, sampling, drafts). A step with n
    such chunks counts n times.
    """
    decode_model_seconds: float = counted(REQUEST_SECONDS, phase="decode", kind="model")
    decode_other_seconds: float = counted(REQUEST_SECONDS, phase="decode", kind="other")
    host_cpu_seconds: float = 0.0
    """CPU time of the computing thread outside of the model, in seconds."""
    loads: StepLoads = field(default_factory=StepLoads)
    """Times of steps by load."""
    log: StepLog = field(default_factory=StepLog)

    def count_step(self, step: Step, result: StepResult) -> None:
        """Count a step that was computed."""
        self.steps += 1
        self.log.note(step, result)
        self.host_cpu_seconds += result.host_cpu_seconds
        # A chunk that follows a context which has ended computes nothing.
        alive = [chunk for chunk, outcome in zip(step.chunks, result.chunks) if outcome.tokens or not chunk.follows]
        tokens = sum(chunk.length for chunk in alive)
        self.loads.count(tokens, sum(chunk.end for chunk in alive), result.seconds)
        prompts = sum(chunk.prefills for chunk in alive)
        self._measure_prefill(step, result.seconds)
        other_seconds = result.seconds - result.model_seconds
        self.prefill_model_seconds += prompts * result.model_seconds
        self.prefill_other_seconds += prompts * other_seconds
        self.decode_model_seconds += (len(alive) - prompts) * result.model_seconds
        self.decode_other_seconds += (len(alive) - prompts) * other_seconds

    def _measure_prefill(self, step: Step, seconds: float) -> None:
        """Average the speed of prefill over large steps; small ones say little about large ones."""
        computed = sum(chunk.length for chunk in step.chunks)
        prompts = sum(chunk.length for chunk in step.chunks if chunk.prefills)
        if prompts < MEASURED_TOKENS or seconds <= 0:
            return
        speed, known = computed / seconds, self.prefill_tokens_per_second
        self.prefill_tokens_per_second = speed if known == 0 else known + (speed - known) / 8

    def count_iteration(self, tokens: int) -> None:
        """Count a step's computed prompt tokens and generated tokens. A step is not counted if all of its
        requests had ended.
        """
        if tokens:
            self.iteration_tokens.observe(tokens)

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Count the drafts of one request that were verified in one step; the first `accepted` were accepted."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_by_position += [0] * (drafted - len(self.accepted_by_position))
        for position in range(accepted):
            self.accepted_by_position[position] += 1

    def count_copies(self, loaded: int, from_device: int, stored: int, seconds: float) -> None:
        """Count a batch of copied blocks.

        Args:
            seconds: time from the batch's submission to the end of its copies.
        """
        self.loaded_blocks += loaded
        self.device_blocks += from_device
        self.stored_blocks += stored
        if loaded or from_device:
            self.swap_ins.observe(seconds)

    def samples(self) -> Iterator[Sample]:
        """Yield all figures for metrics."""
        yield from samples_of(self)
        yield from self.swap_ins.samples()
        yield from self.iteration_tokens.samples()
        for position, count in enumerate(self.accepted_by_position):
            yield Sample(f"accepted_at_{position}", count, ACCEPTED_BY_POSITION, {"position": str(position)})
