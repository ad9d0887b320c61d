"""Toy workers that use the real protocol over real gRPC and Redis, and recite a text instead of computing one.

As with real workers, a token depends only on seed and position: it is byte (seed + position) of the text. A test sets
attributes of a worker to make it silent, failing or full.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import grpc.aio

from paceline.core.block_pool import Counts
from paceline.core.errors import BusyError, InvalidRequestError, PacelineError, TransferError
from paceline.core.metrics import Sample
from paceline.core.numerics import Numerics
from paceline.core.telemetry import carrier_of
from paceline.engine.compute_thread import STEP_SECONDS
from paceline.engine.stats import SchedulerStats
from paceline.proto import common_pb2, kvtransfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.proto.fleet_pb2 import HostReport, LoadReport
from paceline.services.common.credentials import Credentials
from paceline.services.common.registry import Member, Registrar, Role, State, metrics_to_pb
from paceline.services.common.rpc import RpcServer, mapped_errors
from paceline.services.common.tasks import end_tasks
from paceline.services.common.wire import token_from_pb
from paceline.services.common.wire_version import OURS, WireVersions
from paceline.services.decode.outbox import Outbox, Outboxes
from paceline.services.worker.worker import OFFLOAD_BYTES
from tests.services.gateway.toy_kvtransfer import ToyKVTransfer
from tests.services.gateway.toy_model import END, text_of

TEXT = "The quick brown fox jumps over the lazy dog, ünïcödé ✓ and back again. "

ADMISSION = -1
"""Used instead of a number of tokens: the moment before a call is admitted."""

_NOTHING = Credentials()


def _worker_samples() -> list[Sample]:
    stats = SchedulerStats(preemptions=2, drafts=4, draft_tokens=9, accepted_tokens=5, accepted_by_position=[3, 2])
    stats.decode_model_seconds = 0.25
    for seconds in (0.005, 0.009, 0.016):
        stats.swap_ins.observe(seconds)
    return [
        *stats.samples(),
        Sample("bubble_seconds", 0.5, STEP_SECONDS, {"kind": "bubble"}),
        Sample("loaded_bytes", 4096, OFFLOAD_BYTES, {"direction": "load"}),
        *Counts(total=4, free=3, held=1, in_flight=0, cached=0).samples(),
    ]


def _host_samples() -> list[Sample]:
    return list(Counts(total=10, free=5, held=2, in_flight=3, cached=0).samples())


_epochs = itertools.count(1)


@dataclass
class Call:
    """A worker's record of one call."""

    work: common_pb2.Work
    metadata: dict[str, str]
    commands: list[str] = field(default_factory=list)
    source: str = ""
    """The source named in the last `fetch` command to a decode worker."""
    number: int = 0
    """Number of the attempt on the gateway's stream of events, for decode calls."""
    outbox: Outbox = field(default_factory=Outbox)
    outcome: str = "running"
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, **event: Any) -> None:
        self.outbox.event(self.number).MergeFrom(worker_pb2.DecodeEvent(**event))


class ToyWorker(worker_pb2_grpc.PrefillServicer, worker_pb2_grpc.DecodeServicer, ToyKVTransfer):
    """A toy worker of any role."""

    def __init__(
        self,
        role: Role,
        worker_id: str,
        *,
        text: str = TEXT,
        host_id: str = "host",
        port: int = 0,
        max_seqs: int = 8,
        max_model_len: int = 512,
        credentials: Credentials = _NOTHING,
        state: State = "ready",
        model: str = "",
        numerics: Numerics | None = None,
        wire: WireVersions = OURS,
    ) -> None:
        self.role: Role = role
        self.worker_id = worker_id
        self.script = text.encode()
        self.host_id = host_id
        self.state: State = state
        self.model = model
        self.numerics = numerics
        self.wire = wire
        self.layout = "fingerprint"
        self.max_model_len = max_model_len
        self.max_seqs = max_seqs
        self.pause_after: int | None = None
        """Number of tokens of a call after which the worker is silent until `resume` is set, or ADMISSION."""
        self.resume = asyncio.Event()
        self.alive_seconds: float | None = None
        """Seconds between the `alive` messages of a paused decode worker; None sends none."""
        self.fail_after: int | None = None
        """Number of tokens after which every call fails with `fail_code`, or ADMISSION."""
        self.fail_code = grpc.StatusCode.UNAVAILABLE
        self.loses_transfers = False
        """Whether all fetches of blocks fail."""
        self.refusal: PacelineError | None = None
        """Error that the worker raises instead of admitting a call."""
        self.stop_at: int | None = None
        """Output position at which the end token comes."""
        self.answer: Callable[[str], str] | None = None
        """Returns the whole answer to a prompt, which is recited instead of the text, whatever the seed is."""
        self.resets = 0
        self.expectations = []
        self.encodings: set[bytes] = set()
        """Digests of the encodings that its host has."""
        self.fails_to_encode = False
        self.hangs_at = ""
        """The calls for encodings that get no answer: "encode" or "ready"; "" are none."""
        self.told: dict[bytes, str] = {}
        """For each digest that `Media.Ready` named, the address of the host with the encoding."""
        self.was_told = asyncio.Event()
        self.pretends_to_cache = []  # workers find 16 tokens of any context, whatever this list says
        self.calls: list[Call] = []
        self.samples = _worker_samples() if role != "kvtransfer" else _host_samples()
        self.host_report = HostReport()
        self.active = 0
        self.token_delay = 0.0
        self.outboxes = Outboxes()
        self.streams: list[asyncio.Task[None]] = []
        """Tasks that serve the streams of events. To cancel one breaks its stream."""
        self._rpc = RpcServer("127.0.0.1", port, credentials, worker_id)
        self._registrar: Registrar | None = None
        self._epoch = next(_epochs)
        self.port = port

    async def start(self, redis_url: str, cluster: str) -> ToyWorker:
        worker_pb2_grpc.add_PrefillServicer_to_server(self, self._rpc.server)
        worker_pb2_grpc.add_DecodeServicer_to_server(self, self._rpc.server)
        worker_pb2_grpc.add_ComputeServicer_to_server(_ToyCompute(self), self._rpc.server)
        worker_pb2_grpc.add_MaintenanceServicer_to_server(_ToyMaintenance(self), self._rpc.server)
        worker_pb2_grpc.add_MediaServicer_to_server(_ToyMedia(self), self._rpc.server)
        kvtransfer_pb2_grpc.add_KVTransferServicer_to_server(self, self._rpc.server)
        self.port = await self._rpc.start()
        await self._rpc.set_ready(True)
        self._registrar = Registrar(redis_url, cluster, self._member)
        await self._registrar.start()
        return self

    async def stop(self) -> None:
        """Leave Redis and stop the server."""
        await self.leave_redis()
        await self._rpc.close(0)

    async def leave_redis(self) -> None:
        """Remove the worker from Redis, but keep serving."""
        if self._registrar is not None:
            registrar, self._registrar = self._registrar, None
            await registrar.stop()

    async def serve_health(self, serving: bool) -> None:
        await self._rpc.set_ready(serving)

    async def fall_silent(self) -> None:
        """Stop the heartbeat. Redis lists the worker until its entry expires."""
        if self._registrar is not None and self._registrar._task is not None:
            self._registrar._task.cancel()

    async def crash(self) -> None:
        """Stop the server and the heartbeat at once."""
        await self.fall_silent()
        await self._rpc.server.stop(None)

    def take_role(self, role: Role) -> int:
        """Change the role at once, as a worker without requests does. Return the new epoch."""
        self.role, self._epoch = role, next(_epochs)
        if self._registrar is not None:
            self._registrar.announce()
        return self._epoch

    def _member(self) -> Member:
        return Member(
            worker_id=self.worker_id,
            role=self.role,
            epoch=self._epoch,
            address=f"127.0.0.1:{self.port}",
            host_id=self.host_id,
            wire=self.wire,
            state=self.state,
            model=self.model,
            layout=self.layout,
            max_model_len=self.max_model_len,
            max_seqs=self.max_seqs,
            numerics=self.numerics,
            load=LoadReport(running=self.active),
            host=self._host_report(),
            metrics=metrics_to_pb(self.samples),
        )

    def _host_report(self) -> HostReport:
        report = HostReport(next_block_event=int(bool(self.pretends_to_cache)))
        report.MergeFrom(self.host_report)
        return report

    def outcomes(self) -> list[str]:
        return [call.outcome for call in self.calls]

    async def Run(  # type: ignore[override]
        self, request: worker_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with mapped_errors(context), _Tracked(self, request.work, context) as call:
            work = request.work
            await self._progress(call, ADMISSION, context)
            opened = worker_pb2.Opened(
                key=work.key,
                source=f"kv of {self.host_id}",
                cached_tokens=_cached_tokens(work),
                prefix_failed=self.loses_transfers and bool(work.prefix_source),
            )
            await context.write(worker_pb2.PrefillEvent(opened=opened))
            await self._progress(call, 0, context)
            await self.read_encodings(work)
            chunks = self._chunks(len(work.token_ids))
            for chunk in chunks[:-1]:
                report = worker_pb2.Report(chunks=[chunk])
                await context.write(worker_pb2.PrefillEvent(alive=common_pb2.Alive(), report=report))
            for scores in self._scores(work):
                await context.write(worker_pb2.PrefillEvent(prompt_logprobs=scores))
            token, reason = self._token(work, len(work.token_ids) - work.prompt_tokens)
            first = worker_pb2.FirstToken(token=token, finish_reason=reason)
            report = worker_pb2.Report(chunks=chunks[-1:])
            await context.write(worker_pb2.PrefillEvent(first_token=first, report=report))
            if reason == common_pb2.FINISH_REASON_NONE:
                await self._progress(call, 1, context)
                key = common_pb2.Key(
                    request_id=work.key.request_id, attempt=work.key.attempt, generation=work.key.generation + 1
                )
                await context.write(worker_pb2.PrefillEvent(filled=worker_pb2.Filled(key=key)))

    async def Events(  # type: ignore[override]
        self, request: worker_pb2.EventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        serving = asyncio.create_task(self.outboxes.serve(request.stream, context.write))
        self.streams.append(serving)
        try:
            await asyncio.wait((serving,))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream was cut")
        finally:
            await end_tasks(serving)

    async def Generate(  # type: ignore[override]
        self, commands: AsyncIterator[worker_pb2.DecodeCommand], context: grpc.aio.ServicerContext
    ) -> None:
        first = await anext(commands)
        work = first.admit
        async with mapped_errors(context), _Tracked(self, work, context) as call:
            call.outbox, call.number = self.outboxes.of(first.recipient), first.recipient.attempt
            await self._progress(call, ADMISSION, context)
            admitted = worker_pb2.Admitted(
                key=work.key,
                cached_tokens=_cached_tokens(work),
                blocks=5,
                cached_blocks=1,
                prefix_failed=self.loses_transfers and bool(work.prefix_source),
            )
            await context.write(worker_pb2.DecodeEvent(admitted=admitted))
            command = await anext(commands, None)
            if command is None:
                # A gateway never ends its commands. If they end here, the call was cancelled while the worker waited
                # for one.
                raise asyncio.CancelledError
            call.commands.append(command.WhichOneof("command") or "")
            if command.HasField("fetch"):
                call.source = command.fetch.source
                if self.loses_transfers:
                    raise TransferError("the toy was told to lose what it fetches")
                command = await anext(commands)
                call.commands.append(command.WhichOneof("command") or "")
            position = len(work.token_ids) - work.prompt_tokens
            if command.HasField("handoff"):
                expected, _ = self._token(work, position)
                if (command.handoff.key.generation, command.handoff.first_token_id) != (2, expected.id):
                    raise InvalidRequestError("this handoff is not for this worker")
                position += 1
                adopted = worker_pb2.Adopted(blocks=3, bytes_moved=12288, path="carrier pigeon", adopt_ms=0.01)
                call.tell(alive=common_pb2.Alive(), report=worker_pb2.Report(adopted=adopted))
            else:
                await self.read_encodings(work)
                for scores in self._scores(work):
                    call.tell(prompt_logprobs=scores)
            await self._recite(call, work, position, context)

    async def _recite(
        self, call: Call, work: common_pb2.Work, position: int, context: grpc.aio.ServicerContext
    ) -> None:
        for count in itertools.count():
            await self._progress(call, count, context)
            token, reason = self._token(work, position + count)
            call.outbox.token(call.number, token_from_pb(token))
            await call.outbox.flush()
            if reason != common_pb2.FINISH_REASON_NONE:
                effort = worker_pb2.Effort(steps=count + 1, drafts=4, draft_tokens=9, accepted_tokens=5, preemptions=2)
                call.tell(finished=worker_pb2.Finished(reason=reason), report=worker_pb2.Report(effort=effort))
                await call.outbox.flush()
                return

    async def read_encodings(self, work: common_pb2.Work) -> None:
        """Wait until all encodings have been named that the context needs."""
        needed = {span.digest for span in work.media if span.start + span.length > _cached_tokens(work)}
        while not needed <= self.told.keys():
            self.was_told.clear()
            await self.was_told.wait()

    async def _progress(self, call: Call, count: int, context: grpc.aio.ServicerContext) -> None:
        if self.fail_after == count:
            await context.abort(self.fail_code, "the toy was told to fail")
        if self.pause_after == count:
            while not self.resume.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.alive_seconds):
                        await self.resume.wait()
                if self.alive_seconds is not None:
                    call.tell(alive=common_pb2.Alive())
        await asyncio.sleep(self.token_delay)

    @staticmethod
    def _chunks(context_tokens: int) -> list[worker_pb2.Chunk]:
        """Return the chunks of a prompt that is computed with four tokens per step."""
        return [
            worker_pb2.Chunk(first=first, tokens=min(4, context_tokens - first), step_ms=0.5)
            for first in range(0, context_tokens, 4)
        ]

    def _token(self, work: common_pb2.Work, position: int) -> tuple[common_pb2.Token, int]:
        sampling = work.sampling
        if self.answer is not None:
            text = self.answer(text_of(work.token_ids[: work.prompt_tokens])).encode()
            token_id = text[position] if position < len(text) else END
        else:
            token_id = END if self.stop_at == position else self.script[(sampling.seed + position) % len(self.script)]
        reason = common_pb2.FINISH_REASON_NONE
        if token_id in sampling.stop_token_ids or token_id in sampling.constraint.end_token_ids:
            reason = common_pb2.FINISH_REASON_STOP
        elif position + 1 >= sampling.max_tokens:
            reason = common_pb2.FINISH_REASON_LENGTH
        report = _report(token_id, sampling.logprobs) if sampling.HasField("logprobs") else []
        named = sampling.logprob_token_ids
        scores = {each: -each * work.prompt_tokens / 10_000 for each in named}
        report += [common_pb2.Logprob(token_id=each, logprob=score, rank=each + 1) for each, score in scores.items()]
        return common_pb2.Token(id=token_id, logprobs=report), reason

    def _scores(self, work: common_pb2.Work) -> list[common_pb2.PromptLogprobs]:
        if not work.sampling.HasField("prompt_logprobs"):
            return []
        count = work.sampling.prompt_logprobs
        tokens = [common_pb2.Token(id=id, logprobs=_report(id, count)) for id in work.token_ids[1 : work.prompt_tokens]]
        return [
            common_pb2.PromptLogprobs(first=1 + start, tokens=tokens[start : start + 4])
            for start in range(0, len(tokens), 4)
        ]


class _ToyCompute(worker_pb2_grpc.ComputeServicer):
    """A Compute service, for work that needs no decoding."""

    def __init__(self, worker: ToyWorker) -> None:
        self._worker = worker

    async def Run(  # type: ignore[override]
        self, work: common_pb2.Work, context: grpc.aio.ServicerContext
    ) -> None:
        worker = self._worker
        async with mapped_errors(context), _Tracked(worker, work, context) as call:
            call.commands.append("compute")
            await worker._progress(call, ADMISSION, context)
            await context.write(worker_pb2.ComputeEvent(opened=worker_pb2.Opened(key=work.key)))
            if work.kind == common_pb2.WORK_KIND_ENCODE:
                await self._encode(work, context)
                return
            await worker.read_encodings(work)
            for count, scores in enumerate(worker._scores(work)):
                await worker._progress(call, count, context)
                await context.write(worker_pb2.ComputeEvent(prompt_logprobs=scores))
            await context.write(worker_pb2.ComputeEvent(computed=worker_pb2.Computed()))

    async def _encode(self, work: common_pb2.Work, context: grpc.aio.ServicerContext) -> None:
        worker, (span,) = self._worker, work.media
        cached = span.digest in worker.encodings
        if not cached and not work.HasField("media_input"):
            await context.write(worker_pb2.ComputeEvent(input_needed=worker_pb2.InputNeeded()))
            return
        if worker.fails_to_encode:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the toy was told not to encode")
        if worker.hangs_at == "encode":
            await asyncio.Event().wait()
        worker.encodings.add(span.digest)
        encoded = worker_pb2.Encoded(source=f"kv of {worker.host_id}", cached=cached, queue_ms=1, encode_ms=2, bytes=64)
        await context.write(worker_pb2.ComputeEvent(encoded=encoded))
        await asyncio.Event().wait()


class _ToyMedia(worker_pb2_grpc.MediaServicer):
    def __init__(self, worker: ToyWorker) -> None:
        self._worker = worker

    async def Ready(  # type: ignore[override]
        self, request: worker_pb2.ReadyRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ReadyReply:
        worker = self._worker
        async with mapped_errors(context):
            if worker.hangs_at == "ready":
                await asyncio.Event().wait()
            own = request.source == f"kv of {worker.host_id}"
            if worker.loses_transfers and not own:
                raise TransferError("the toy was told to lose what it fetches")
            worker.told[request.digest] = request.source
            worker.was_told.set()
            return worker_pb2.ReadyReply(bytes_moved=0 if own else 64)
        raise AssertionError("an error ends the call")


class _ToyMaintenance(worker_pb2_grpc.MaintenanceServicer):
    def __init__(self, worker: ToyWorker) -> None:
        self._worker = worker

    async def ResetPool(  # type: ignore[override]
        self, request: worker_pb2.ResetPoolRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ResetPoolReply:
        self._worker.resets += 1
        return worker_pb2.ResetPoolReply(blocks=3)

    async def Steps(  # type: ignore[override]
        self, request: worker_pb2.StepsRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.StepsReply:
        return worker_pb2.StepsReply(steps=[worker_pb2.StepRecord(number=7, seconds=0.25, prompt_tokens=128)])

    async def SetRole(  # type: ignore[override]
        self, request: worker_pb2.SetRoleRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SetRoleReply:
        return worker_pb2.SetRoleReply(epoch=self._worker.take_role(cast(Role, request.role)))


class _Tracked:
    """A context manager that admits a call and records its outcome."""

    def __init__(self, worker: ToyWorker, work: common_pb2.Work, context: grpc.aio.ServicerContext) -> None:
        self._worker = worker
        self._call = Call(work, carrier_of(context.invocation_metadata()))

    async def __aenter__(self) -> Call:
        self._worker.calls.append(self._call)
        full = BusyError("this toy is full") if self._worker.active >= self._worker.max_seqs else None
        if (refusal := self._worker.refusal or full) is not None:
            self._call.outcome = "refused"
            self._call.ended.set()
            raise refusal
        self._worker.active += 1
        return self._call

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._worker.active -= 1
        cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        if kind is not None:
            self._call.tell()
        self._call.outcome = "finished" if kind is None else "cancelled" if cancelled else "failed"
        self._call.ended.set()


def _cached_tokens(work: common_pb2.Work) -> int:
    return min(16, work.prompt_tokens - 1)


def _report(token_id: int, count: int) -> list[common_pb2.Logprob]:
    """Return `count` + 1 logprobs: the token itself at rank 2, then the most likely tokens "A", the token, "B", …"""
    chosen = common_pb2.Logprob(token_id=token_id, logprob=-1.0, rank=2)
    others = [common_pb2.Logprob(token_id=65 + rank, logprob=-0.5 * (rank + 1), rank=rank + 1) for rank in range(count)]
    if count > 1:
        others[1] = chosen
    return [chosen, *others]
