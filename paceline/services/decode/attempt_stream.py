"""The engine's events of one attempt on their way to the gateway."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.errors import PacelineError
from paceline.engine.step import Computed, Preempted, Sampled, Scored
from paceline.proto import worker_pb2
from paceline.services.common.wire import reason_to_pb, scores_to_pb
from paceline.services.decode.outbox import Outbox
from paceline.services.worker.event_stream import EventStream, Reporter, RequestEvent


class AttemptStream(EventStream):
    """Sends an attempt's events to the gateway at once. The attempt's handler wakes only if it has to do something.

    Args:
        attempt: number of the attempt on the gateway's stream of events.
        goes_on: returns whether the engine is idle or takes its steps in time (`Worker.goes_on`).
    """

    def __init__(self, outbox: Outbox, attempt: int, goes_on: Callable[[], bool]) -> None:
        super().__init__()
        self.reporter = Reporter()
        self._outbox = outbox
        self._attempt = attempt
        self._goes_on = goes_on

    def put(self, event: RequestEvent | PacelineError) -> None:
        match event:
            case Sampled(_, token, reason):
                self._outbox.token(self._attempt, token)
                if reason is None:
                    self._tell_news()
                else:
                    last = self._outbox.event(self._attempt)
                    last.finished.reason = reason_to_pb(reason)
                    self._report(last, is_last=True)
                    super().put(event)
            case Computed():
                self.reporter.note((event,))
                self._tell_news()
            case Scored(_, first, tokens):
                for scores in scores_to_pb(first, tokens):
                    self._outbox.event(self._attempt).prompt_logprobs.CopyFrom(scores)
                    self._outbox.end_message()  # prompt logprobs may be large
            case _:
                if isinstance(event, Preempted):
                    self.reporter.note((event,))
                super().put(event)

    def tell_alive(self) -> None:
        """Send `alive` and the totals that are due, if the request still makes progress."""
        if self._goes_on():
            told = self._outbox.event(self._attempt)
            told.alive.SetInParent()
            self._report(told)

    async def end(self) -> Sampled | Preempted:
        """Wait until the request leaves the engine and return its last event. All events before it have been sent.

        Raises StaleError if the request lost its blocks, InvalidRequestError if the engine cannot go on with it,
        UnavailableError if the gateway's stream has ended.
        """
        while not (batch := await self.batch()):
            self.tell_alive()
        (event,) = batch
        assert isinstance(event, Sampled | Preempted)
        return event

    def _tell_news(self) -> None:
        if self.reporter.is_due:
            told = self._outbox.event(self._attempt)
            told.alive.SetInParent()
            self._report(told)

    def _report(self, told: worker_pb2.DecodeEvent, is_last: bool = False) -> None:
        if (report := self.reporter.take(is_last)) is not None:
            told.report.MergeFrom(report)
