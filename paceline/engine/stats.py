"""What a scheduler counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.core.metrics import Family, Histogram, Sample, counted, samples_of
from paceline.engine.step import Step, StepResult

DRAFTS = Family("spec_decode_num_drafts", "Times that drafts of a request were verified")
DRAFT_TOKENS = Family("spec_decode_num_draft_tokens", "Draft tokens that were verified")
ACCEPTED_TOKENS = Family("spec_decode_num_accepted_tokens", "Draft tokens that were accepted")
ACCEPTED_BY_POSITION = Family("spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position")
PREEMPTIONS = Family("num_preemptions", "Requests that lost their blocks and had to compute them again")
PARKINGS = Family("num_parkings", "Requests that left a worker's pool to come back later")
SWAP_INS = Family("kv_swap_in_seconds", "Seconds until the blocks of a request were in a worker's pool", "histogram")
REQUEST_SECONDS = Family(
    "worker_request_step_seconds",
    "Time of steps, counted for each request in them; model: forward pass and logits; other: the rest",
)

MEASURED_TOKENS = 128
"""Of prompts, at least, in a step that tells how fast they are computed."""


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    drafts: int = counted(DRAFTS)
    """Times that drafts of a request were verified."""
    draft_tokens: int = counted(DRAFT_TOKENS)
    accepted_tokens: int = counted(ACCEPTED_TOKENS)
    accepted_by_position: list[int] = field(default_factory=list)
    """How often the first, second, … draft came true."""
    preemptions: int = counted(PREEMPTIONS)
    swap_outs: int = counted(PARKINGS)
    """Times that a request left the device's pool for the arena, to come back later."""
    loaded_blocks: int = 0
    """From the arena into the device's pool."""
    device_blocks: int = 0
    """From another worker's pool on the same device."""
    stored_blocks: int = 0
    """The other way."""
    swap_ins: Histogram = field(default_factory=lambda: Histogram("swap_in", SWAP_INS, (1, 2, 5, 10, 20, 50, 100)))
    """Seconds from when a request had its place in the pool until its blocks were there."""
    prefill_tokens_per_second: float = 0.0
    """At which large chunks of prompts were computed lately; 0 before the first one."""
    prefill_model_seconds: float = counted(REQUEST_SECONDS, phase="prefill", kind="model")
    """Time that requests spent in steps, each step counted once for each of them: here with prompts, in the model."""
    prefill_other_seconds: float = counted(REQUEST_SECONDS, phase="prefill", kind="other")
    """With prompts, in the rest of steps: inputs, sampling, drafts."""
    decode_model_seconds: float = counted(REQUEST_SECONDS, phase="decode", kind="model")
    decode_other_seconds: float = counted(REQUEST_SECONDS, phase="decode", kind="other")
    host_cpu_seconds: float = 0.0
    """CPU time of the computing thread outside of the model."""

    def count_step(self, step: Step, result: StepResult) -> None:
        """A step was computed."""
        self.steps += 1
        self.host_cpu_seconds += result.host_cpu_seconds
        # What goes on from a context that has ended computes nothing.
        alive = [chunk for chunk, own in zip(step.chunks, result.chunks) if own.tokens or not chunk.follows]
        prompts = sum(chunk.prefills for chunk in alive)
        self._measure_prefill(step, result.seconds)
        other_seconds = result.seconds - result.model_seconds
        self.prefill_model_seconds += prompts * result.model_seconds
        self.prefill_other_seconds += prompts * other_seconds
        self.decode_model_seconds += (len(alive) - prompts) * result.model_seconds
        self.decode_other_seconds += (len(alive) - prompts) * other_seconds

    def _measure_prefill(self, step: Step, seconds: float) -> None:
        """A step counts by its share of prompt tokens; a small one, which says little about large ones, does not."""
        computed = sum(chunk.length for chunk in step.chunks)
        prompts = sum(chunk.length for chunk in step.chunks if chunk.prefills)
        if prompts < MEASURED_TOKENS or seconds <= 0:
            return
        speed, known = computed / seconds, self.prefill_tokens_per_second
        self.prefill_tokens_per_second = speed if known == 0 else known + (speed - known) / 8

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Drafts of one request in one step were verified; the first `accepted` came true."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_by_position += [0] * (drafted - len(self.accepted_by_position))
        for position in range(accepted):
            self.accepted_by_position[position] += 1

    def count_copies(self, loaded: int, from_device: int, stored: int, seconds: float) -> None:
        """So many blocks of a request were copied, so long after this was asked for."""
        self.loaded_blocks += loaded
        self.device_blocks += from_device
        self.stored_blocks += stored
        if loaded or from_device:
            self.swap_ins.observe(seconds)

    def samples(self) -> Iterator[Sample]:
        """Yield all figures for metrics."""
        yield from samples_of(self)
        yield from self.swap_ins.samples()
        for position, count in enumerate(self.accepted_by_position):
            yield Sample(f"accepted_at_{position}", count, ACCEPTED_BY_POSITION, {"position": str(position)})
