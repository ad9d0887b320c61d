"""Times in which a device works on steps, and in which it is idle between them, on the device's own timeline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core.kv_coding import KVCoding
from paceline.engine.engine import Runner
from paceline.engine.step import Step, StepResult
from paceline.kernels.interface import ForwardInputs, Logits
from paceline.models.base import EncodedRows, Model


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Figures of the steps that only decode. All except `bubble` are medians."""

    idle_ms: float
    """Time from a step's last kernel to the next step's first."""
    forward_ms: float
    """Time from a step's first kernel to the end of its forward pass."""
    rest_ms: float
    """Time from the end of the forward pass to the last kernel: logits, verifying, drafting, and their host work."""
    bubble: float
    """Share of the total time in which the device was idle between steps."""


class Event(Protocol):
    """The part of torch.cuda.Event that is used here."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to a later one."""


class HostEvent:
    """An event for runs on the CPU."""

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: HostEvent) -> float:
        return (end_event.time - self.time) * 1e3


class StepClock:
    """A clock for the steps of one device's runner.

    A step has three events: before its first kernel, after its forward pass, after its last kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps: list[tuple[bool, list[Event]]] = []

    def watch(self, runner: Runner) -> Runner:
        """Wrap a runner so that its steps are timed, and forget earlier steps. Its model must be a `WatchedModel`."""
        self._steps.clear()
        return _WatchedRunner(runner, self)

    def begin_step(self, step: Step) -> None:
        self._steps.append((all(chunk.follows for chunk in step.chunks), []))

    def mark_forward(self) -> None:
        """Mark either end of a forward pass. Only the first pass of a step counts; later passes make drafts."""
        if len(self._steps[-1][1]) < 2:
            self.mark()

    def mark(self) -> None:
        event: Event = torch.cuda.Event(enable_timing=True) if self._on_gpu else HostEvent()
        event.record()
        self._steps[-1][1].append(event)

    def times(self) -> DeviceTimes:
        """Return the times of the watched runner after its last step."""
        self._steps[-1][1][-1].synchronize()
        idle, forward, rest = [], [], []
        for (_, before), (decodes, (first, computed, last)) in zip(self._steps, self._steps[1:]):
            if decodes:
                idle.append(before[-1].elapsed_time(first))
                forward.append(first.elapsed_time(computed))
                rest.append(computed.elapsed_time(last))
        return DeviceTimes(
            idle_ms=statistics.median(idle),
            forward_ms=statistics.median(forward),
            rest_ms=statistics.median(rest),
            bubble=sum(idle) / sum(idle + forward + rest),
        )


class WatchedModel:
    """A model that marks both ends of each forward pass. See `Model`."""

    def __init__(self, model: Model, clock: StepClock) -> None:
        self._model = model
        self._clock = clock
        self.config = model.config
        self.group_shapes = model.group_shapes
        self.layer_groups = model.layer_groups

    def code_kv(self, coding: KVCoding) -> None:
        self._model.code_kv(coding)
        self.group_shapes, self.layer_groups = self._model.group_shapes, self._model.layer_groups

    def forward(
        self, inputs: ForwardInputs, wanted: Sequence[int] | None = None, encoded: EncodedRows | None = None
    ) -> Tensor:
        self._clock.mark_forward()
        hidden = self._model.forward(inputs, wanted, encoded)
        self._clock.mark_forward()
        return hidden

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Logits:
        return self._model.logits(hidden, adapters)


class _WatchedRunner:
    def __init__(self, runner: Runner, clock: StepClock) -> None:
        self._runner = runner
        self._clock = clock

    def execute(self, step: Step) -> StepResult:
        self._clock.begin_step(step)
        result = self._runner.execute(step)
        self._clock.mark()
        return result
