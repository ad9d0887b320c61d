"""The steps under way of a simulated worker, and the event at their end. The event moves if the steps are cut or
paused.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.simulator.events import Events
from paceline.simulator.steps import Run


class RunClock:
    """Holds at most one run of steps at a time.

    Args:
        ended: called with a run whose time is over.
    """

    def __init__(self, events: Events, ended: Callable[[Run], object]) -> None:
        self.run: Run | None = None
        """The steps under way; None if there are none."""
        self._events, self._ended = events, ended
        self._version = 0
        """Incremented at every change of the end, so that events of earlier ends are ignored."""
        self._left = 0.0
        """Seconds of work that were left at `_resumed`."""
        self._speed = 1.0
        """Seconds of work that are done in one simulated second."""
        self._is_paused = False
        self._resumed = 0.0

    def begin(self, run: Run, speed: float = 1.0) -> None:
        """Begin a run of steps. It replaces the run under way, if there is one.

        Args:
            speed: seconds of the steps' work that are done in one second.
        """
        self.run, self._speed = run, speed
        self._go_on(max(0.0, run.begin + run.seconds(run.steps) - self._events.now))

    def cut(self, steps: int) -> None:
        """End the run after its first `steps` steps. Do nothing if it has no more steps than that."""
        run = self.run
        if run is not None and steps < run.steps:
            run.steps = steps
            self.begin(run)

    def steps_begun(self) -> int:
        """Return the number of steps of the run that have begun."""
        run = self.run
        if run is None or run.steps == 1 or self._is_paused:
            return 0 if run is None else run.steps
        passed = self._events.now - run.begin
        return max(1, run.ratios.steps_within(passed, run.index, run.steps, run.first, run.growth))

    def stop(self) -> None:
        """Drop the current run. Its event, which is still scheduled, then does nothing."""
        self._version += 1
        self.run, self._is_paused = None, False

    def pause(self) -> None:
        """Interrupt the step under way until `resume`. Its computed part stays computed."""
        if self.run is not None and not self._is_paused:
            self._is_paused, self._left = True, self._work_left()
            self._version += 1

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens that the step under way computes."""
        return 0 if self.run is None else sum(tokens for _, tokens in self.run.chunks)

    def delay_prompts(self, seconds: float) -> None:
        """Lengthen the step under way by `seconds` of work, because requests arrive while it computes prompts."""
        if self._is_paused:
            self._left += seconds
        elif self.run is not None and self.run.chunks:
            self._go_on(self._work_left() + seconds)

    def resume(self, speed: float) -> None:
        """Continue a paused step, at another speed."""
        if self.run is not None and self._is_paused:
            self._is_paused, self._speed = False, speed
            self._go_on(self._left)

    def _work_left(self) -> float:
        return max(0.0, self._left - self._speed * (self._events.now - self._resumed))

    def _go_on(self, seconds: float) -> None:
        """Schedule the end of the step after `seconds` more seconds of work."""
        self._version += 1
        self._left, self._resumed = seconds, self._events.now
        self._events.after(seconds / self._speed, self._end, self._version)

    def _end(self, version: int) -> None:
        if version == self._version and self.run is not None:
            run, self.run = self.run, None
            self._ended(run)
