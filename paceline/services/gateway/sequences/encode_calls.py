"""The encodings of one attempt: a worker computes each encoding or has it cached, and the reader is told where it is.

    encode:   Run ─▶ Opened ─▶ Alive… ─▶ (InputNeeded ─▶ Run again with the input ─▶ …) ─▶ Encoded
    reader:                                                                                 Media.Ready

The reader is the worker that computes the prompt. Meanwhile it computes the prompt up to the first missing encoding.
When `Media.Ready` returns, the reader has a lease of the encoding, and the call that computed the encoding is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.errors import PacelineError
from paceline.core.media import MediaInput, MediaSpan
from paceline.core.telemetry import trace_headers
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.tasks import own_cancellation
from paceline.services.common.wire import media_input_to_pb, span_to_pb, spans_from_pb
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.routing.candidates import Link
from paceline.services.gateway.routing.encode_router import EncodeNeed, EncodingIndex, place_encoding
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.worker_call import (
    ADMIT_SECONDS,
    WorkerBusyError,
    WorkerCall,
    WorkerDrainingError,
    WorkerFailedError,
    answer,
    out_of_turn,
    reply_of,
)

log = logging.getLogger(__name__)

PARALLEL = 2
"""Largest number of encodings of one attempt that run at the same time, per encode worker: the worker computes one
while the next one waits there."""
READY_SECONDS = 30.0
"""Deadline of `Media.Ready`, in seconds. The reader may have to fetch the encoding from another host."""


class EncodeRefusedError(WorkerBusyError):
    """No worker takes an encoding now, because all workers are full. This is no failure of a worker."""


@dataclass(frozen=True, slots=True)
class AttemptMedia:
    """The media of one attempt, and facts about the places of their encodings."""

    inputs: Mapping[bytes, MediaInput]
    """The encoder's input for each span of media, by the span's digest."""
    encodings: EncodingIndex
    """The index of encodings that hosts have cached, which all attempts share."""
    failed: frozenset[str] = frozenset()
    """Ids of workers on which an earlier attempt failed."""


class EncodeCalls:
    """The encodings of one attempt, from `start` to `close`.

    Args:
        work: the attempt's work, with its spans of media.
        seconds: longest duration of a call, in seconds.
        stall_seconds: seconds without a message after which a worker counts as failed.
        attempt_trace: the trace to which the facts about each encoding are added.
    """

    def __init__(
        self,
        fleet: Fleet,
        media: AttemptMedia,
        work: common_pb2.Work,
        *,
        seconds: float,
        stall_seconds: float,
        attempt_trace: AttemptTrace,
    ) -> None:
        self.error: Exception | None = None
        """The first failure of an encoding, because of which the attempt cannot go on; None if there is none."""
        self._fleet = fleet
        self._media = media
        self._work = work
        self._seconds = seconds
        self._stall_seconds = stall_seconds
        self._attempt_trace = attempt_trace
        self._task: asyncio.Task[None] | None = None

    def start(self, reader: RemoteWorker, cached_tokens: int, on_failure: Callable[[Exception], object]) -> None:
        """Start tasks that have the encodings computed which the prompt still needs, in the order of the spans.

        Args:
            reader: the worker that computes the prompt and has accepted the attempt.
            cached_tokens: tokens at the beginning of the context that the reader has cached.
            on_failure: called once if an encoding fails, with the error.
        """
        needed = {span.digest: span for span in spans_from_pb(self._work.media) if span.end > cached_tokens}
        if needed:
            self._task = asyncio.create_task(self._run(reader, list(needed.values()), on_failure))

    def close(self) -> None:
        """End all calls that still run."""
        if self._task is not None:
            self._task.cancel()
        self.error = None  # its traceback knows this object

    async def _run(
        self, reader: RemoteWorker, spans: Sequence[MediaSpan], on_failure: Callable[[Exception], object]
    ) -> None:
        encoders = sum(each.member.role == "encode" for each in self._fleet.snapshot())
        places = asyncio.Semaphore(PARALLEL * max(1, encoders))

        def cancelled() -> WorkerFailedError:
            return WorkerFailedError("a call for an encoding was cancelled", reader, unreachable=False)

        async def encode(span: MediaSpan) -> None:
            async with places:
                with own_cancellation(cancelled):  # a task group does not see that a task of it was cancelled
                    await self._encode(reader, span)

        try:
            async with asyncio.TaskGroup() as group:
                for span in spans:
                    group.create_task(encode(span))
        except* Exception as errors:
            error = errors.exceptions[0]
            if not isinstance(error, PacelineError):
                log.error("unexpected error while encodings were computed", exc_info=error)
                reason = "an encoding failed for an unexpected reason, which the gateway's log has"
                error = WorkerFailedError(reason, reader, unreachable=False)
            self.error = error
            on_failure(error)

    async def _encode(self, reader: RemoteWorker, span: MediaSpan) -> None:
        """Have one encoding computed by a worker, and tell the reader. If a worker refuses, ask another one."""
        began = time.monotonic()
        refused: frozenset[str] = frozenset()
        lacking: frozenset[str] = frozenset()
        refusal: WorkerFailedError | WorkerBusyError | None = None
        while True:
            need = self._need(reader, span, refused, lacking)
            if (member := place_encoding(need, self._fleet.snapshot())) is None:
                assert refusal is not None
                try:
                    raise refusal
                finally:
                    del refusal  # its traceback has this frame
            # The fleet may have dropped the reader already, but its call still runs.
            is_reader = member.worker_id == reader.member.worker_id
            worker = reader if is_reader else self._fleet.worker(member.worker_id)
            try:
                told = await self._ask(worker, reader, span, with_input=not need.is_known_to(member))
            except _AskAnotherError as error:
                refusal, refused = error.reason, refused | {member.worker_id}
                continue
            if told is None:
                lacking |= {member.host_id, member.worker_id}
                continue
            encoded, moved = told
            self._attempt_trace.add_encoding(span, member, began, encoded, moved)
            return

    def _need(
        self, reader: RemoteWorker, span: MediaSpan, refused: frozenset[str], lacking: frozenset[str]
    ) -> EncodeNeed:
        """Return the facts for placing an encoding.

        Args:
            refused: ids of workers that have refused the encoding.
            lacking: ids of hosts and workers that turned out not to have the encoding.
        """
        index, salt = self._media.encodings, self._work.cache_salt
        return EncodeNeed(
            reader.member,
            hosts=index.hosts(span, salt) - lacking,
            computing=index.workers(span, salt) - lacking,
            refused=refused,
            failed=self._media.failed,
            cut=self._fleet.failed_links(),
        )

    async def _ask(
        self, worker: RemoteWorker, reader: RemoteWorker, span: MediaSpan, with_input: bool
    ) -> tuple[worker_pb2.Encoded, int] | None:
        """Call one worker, and tell the reader when the encoding is complete.

        Returns:
            The worker's last event and the number of bytes that the reader fetched; None if the worker needs the input.

        Raises:
            _AskAnotherError: the worker has no room, drains or cannot be reached. Another worker may take the encoding.
        """
        with contextlib.ExitStack() as resources:
            resources.enter_context(self._fleet.encode_call(worker))
            worker_id = worker.member.worker_id
            resources.enter_context(self._media.encodings.computing(span, self._work.cache_salt, worker_id))
            stub = worker_pb2_grpc.ComputeStub(worker.channel)
            running = stub.Run(self._order(span, with_input), timeout=self._seconds, metadata=trace_headers())
            resources.callback(running.cancel)
            call = WorkerCall(running, worker, None)
            try:
                event = await answer(call.read(ADMIT_SECONDS), worker)
            except WorkerFailedError as error:
                if worker is not reader and isinstance(error, WorkerDrainingError):
                    raise _AskAnotherError(error) from error
                if worker is not reader and error.unreachable:
                    self._fleet.set_aside(worker)
                    raise _AskAnotherError(error) from error
                raise
            except WorkerBusyError as error:
                raise _AskAnotherError(EncodeRefusedError(str(error), worker)) from error
            if not event.HasField("opened"):
                raise out_of_turn(worker)
            encoded = await self._completion(call)
            return None if encoded is None else (encoded, await self._tell(reader, worker, span, encoded.source))

    async def _completion(self, call: WorkerCall) -> worker_pb2.Encoded | None:
        """Wait until the worker has the encoding, and return its last event; None if the worker needs the input."""
        while True:
            try:
                event: worker_pb2.ComputeEvent = await call.read(self._stall_seconds)
            except WorkerBusyError as error:
                raise _AskAnotherError(EncodeRefusedError(str(error), call.worker)) from error
            match event.WhichOneof("event"):
                case "alive":
                    continue
                case "input_needed":
                    return None
                case "encoded":
                    return event.encoded
            raise out_of_turn(call.worker)

    async def _tell(self, reader: RemoteWorker, worker: RemoteWorker, span: MediaSpan, source: str) -> int:
        """Tell the reader where the encoding is. Return the number of bytes that the reader fetched."""
        hosts = worker.member.host_id, reader.member.host_id
        link: Link | None = None if hosts[0] == hosts[1] else hosts
        ready = worker_pb2.ReadyRequest(key=self._work.key, digest=span.digest, source=source)
        stub = worker_pb2_grpc.MediaStub(reader.channel)
        call = stub.Ready(ready, timeout=READY_SECONDS, metadata=trace_headers())
        try:
            reply: worker_pb2.ReadyReply = await reply_of(call, reader, link)
        except WorkerBusyError as error:
            raise EncodeRefusedError(str(error), reader) from error
        return reply.bytes_moved

    def _order(self, span: MediaSpan, with_input: bool) -> common_pb2.Work:
        work, own = self._work, dataclasses.replace(span, start=0)
        media = media_input_to_pb(self._media.inputs[span.digest]) if with_input else None
        return common_pb2.Work(
            key=work.key,
            model=work.model,
            kind=common_pb2.WORK_KIND_ENCODE,
            cache_salt=work.cache_salt,
            priority=work.priority,
            media=[span_to_pb(own)],
            media_input=media,
        )


class _AskAnotherError(Exception):
    """A worker does not take an encoding now."""

    def __init__(self, reason: WorkerFailedError | WorkerBusyError) -> None:
        super().__init__(str(reason))
        self.reason = reason
