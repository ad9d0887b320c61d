"""When a device works on steps and when it stands still between them, on its own timeline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.engine.engine import Runner
from paceline.engine.step import Step, StepResult
from paceline.kernels.interface import AnyCache, AttentionBatch, Logits, Taps
from paceline.models.base import Model


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Of the steps of a run that decode alone; medians where nothing else is said."""

    idle_ms: float
    """From a step's last kernel to the next step's first."""
    forward_ms: float
    """From a step's first kernel to the end of the forward pass."""
    rest_ms: float
    """From there to its last kernel: logits, verifying, drafting, and the host's part in them."""
    bubble: float
    """Share of all the time in which the device stood still between steps."""


class Event(Protocol):
    """What is needed of torch.cuda.Event."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to a later one."""


class HostEvent:
    """An event where the host is the device."""

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: HostEvent) -> float:
        return (end_event.time - self.time) * 1e3


class StepClock:
    """Watches the runner of one device.

    A step has three events: before its first kernel, behind its forward pass, behind its last kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps: list[tuple[bool, list[Event]]] = []

    def watch(self, runner: Runner) -> Runner:
        """The same runner, its steps timed; its model must be a `WatchedModel`. Forgets what was watched before."""
        self._steps.clear()
        return _WatchedRunner(runner, self)

    def begin_step(self, step: Step) -> None:
        self._steps.append((all(chunk.follows for chunk in step.chunks), []))

    def mark_forward(self) -> None:
        """Either end of a forward pass; only the first of a step counts, the others draft."""
        if len(self._steps[-1][1]) < 2:
            self.mark()

    def mark(self) -> None:
        event: Event = torch.cuda.Event(enable_timing=True) if self._on_gpu else HostEvent()
        event.record()
        self._steps[-1][1].append(event)

    def times(self) -> DeviceTimes:
        """Of the runner that was watched, which has ended."""
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
    """A model that marks the two ends of each forward pass. See `Model`."""

    def __init__(self, model: Model, clock: StepClock) -> None:
        self._model = model
        self._clock = clock
        self.config = model.config
        self.group_shapes = model.group_shapes
        self.layer_groups = model.layer_groups

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[AnyCache],
        batch: AttentionBatch,
        layers: int | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        self._clock.mark_forward()
        hidden = self._model.forward(token_ids, positions, caches, batch, layers, taps)
        self._clock.mark_forward()
        return hidden

    def logits(self, hidden: Tensor) -> Logits:
        return self._model.logits(hidden)


class _WatchedRunner:
    def __init__(self, runner: Runner, clock: StepClock) -> None:
        self._runner = runner
        self._clock = clock

    def execute(self, step: Step) -> StepResult:
        self._clock.begin_step(step)
        result = self._runner.execute(step)
        self._clock.mark()
        return result
