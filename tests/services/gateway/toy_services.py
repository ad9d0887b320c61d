"""The gRPC services of a toy worker that run requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from paceline.core.errors import InvalidRequestError, TransferError
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc_errors import mapped_errors
from paceline.services.common.tasks import end_tasks
from tests.services.gateway.toy_calls import ADMISSION, ToyCalls, cached_tokens
from tests.services.gateway.toy_pooling import toy_events


class ToyPrefill(worker_pb2_grpc.PrefillServicer):
    """A Prefill service."""

    def __init__(self, toy: ToyCalls) -> None:
        self._toy = toy

    async def Run(  # type: ignore[override]
        self, request: worker_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with self._toy.admit(request.work, context) as call:
            work = request.work
            await self._toy.progress(call, ADMISSION, context)
            opened = worker_pb2.Opened(
                key=work.key,
                source=f"kv of {self._toy.host_id}",
                cached_tokens=cached_tokens(work),
                prefix_failed=self._toy.loses_transfers and bool(work.prefix_source),
            )
            await context.write(worker_pb2.PrefillEvent(opened=opened))
            await self._toy.progress(call, 0, context)
            await self._toy.read_encodings(work)
            chunks = _chunks(len(work.token_ids))
            for chunk in chunks[:-1]:
                report = worker_pb2.Report(chunks=[chunk])
                await context.write(worker_pb2.PrefillEvent(alive=common_pb2.Alive(), report=report))
            for scores in self._toy.scores(work):
                await context.write(worker_pb2.PrefillEvent(prompt_logprobs=scores))
            token, reason = self._toy.token(work, len(work.token_ids) - work.prompt_tokens)
            first = worker_pb2.FirstToken(token=token, finish_reason=reason)
            report = worker_pb2.Report(chunks=chunks[-1:])
            await context.write(worker_pb2.PrefillEvent(first_token=first, report=report))
            if reason == common_pb2.FINISH_REASON_NONE:
                await self._toy.progress(call, 1, context)
                key = common_pb2.Key(
                    request_id=work.key.request_id, attempt=work.key.attempt, generation=work.key.generation + 1
                )
                await context.write(worker_pb2.PrefillEvent(filled=worker_pb2.Filled(key=key)))


class ToyDecode(worker_pb2_grpc.DecodeServicer):
    """A Decode service."""

    def __init__(self, toy: ToyCalls) -> None:
        self._toy = toy

    async def Events(  # type: ignore[override]
        self, request: worker_pb2.EventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        serving = asyncio.create_task(self._toy.outboxes.serve(request.stream, context.write))
        self._toy.streams.append(serving)
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
        async with self._toy.admit(work, context) as call:
            call.outbox, call.number = self._toy.outboxes.of(first.recipient), first.recipient.attempt
            await self._toy.progress(call, ADMISSION, context)
            admitted = worker_pb2.Admitted(
                key=work.key,
                cached_tokens=cached_tokens(work),
                blocks=5,
                cached_blocks=1,
                prefix_failed=self._toy.loses_transfers and bool(work.prefix_source),
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
                if self._toy.loses_transfers:
                    raise TransferError("the toy was told to lose what it fetches")
                command = await anext(commands)
                call.commands.append(command.WhichOneof("command") or "")
            position = len(work.token_ids) - work.prompt_tokens
            if command.HasField("handoff"):
                expected, _ = self._toy.token(work, position)
                if (command.handoff.key.generation, command.handoff.first_token_id) != (2, expected.id):
                    raise InvalidRequestError("this handoff is not for this worker")
                position += 1
                adopted = worker_pb2.Adopted(blocks=3, bytes_moved=12288, path="carrier pigeon", adopt_ms=0.01)
                call.tell(alive=common_pb2.Alive(), report=worker_pb2.Report(adopted=adopted))
            else:
                await self._toy.read_encodings(work)
                for scores in self._toy.scores(work):
                    call.tell(prompt_logprobs=scores)
            await self._toy.recite(call, work, position, context)


class ToyCompute(worker_pb2_grpc.ComputeServicer):
    """A Compute service, for work that needs no decoding."""

    def __init__(self, toy: ToyCalls) -> None:
        self._toy = toy

    async def Run(  # type: ignore[override]
        self, work: common_pb2.Work, context: grpc.aio.ServicerContext
    ) -> None:
        async with self._toy.admit(work, context) as call:
            call.commands.append("compute")
            await self._toy.progress(call, ADMISSION, context)
            await context.write(worker_pb2.ComputeEvent(opened=worker_pb2.Opened(key=work.key)))
            if work.kind == common_pb2.WORK_KIND_ENCODE:
                await self._encode(work, context)
                return
            if work.kind == common_pb2.WORK_KIND_POOL:
                for count, event in enumerate(toy_events(work.pool)):
                    await self._toy.progress(call, count, context)
                    await context.write(event)
                await context.write(worker_pb2.ComputeEvent(computed=worker_pb2.Computed()))
                return
            await self._toy.read_encodings(work)
            for count, scores in enumerate(self._toy.scores(work)):
                await self._toy.progress(call, count, context)
                await context.write(worker_pb2.ComputeEvent(prompt_logprobs=scores))
            await context.write(worker_pb2.ComputeEvent(computed=worker_pb2.Computed()))

    async def _encode(self, work: common_pb2.Work, context: grpc.aio.ServicerContext) -> None:
        (span,) = work.media
        cached = span.digest in self._toy.encodings
        if not cached and not work.HasField("media_input"):
            await context.write(worker_pb2.ComputeEvent(input_needed=worker_pb2.InputNeeded()))
            return
        if self._toy.fails_to_encode:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the toy was told not to encode")
        if self._toy.hangs_at == "encode":
            await asyncio.Event().wait()
        self._toy.encodings.add(span.digest)
        encoded = worker_pb2.Encoded(
            source=f"kv of {self._toy.host_id}", cached=cached, queue_ms=1, encode_ms=2, bytes=64
        )
        await context.write(worker_pb2.ComputeEvent(encoded=encoded))
        await asyncio.Event().wait()


class ToyMedia(worker_pb2_grpc.MediaServicer):
    """A Media service."""

    def __init__(self, toy: ToyCalls) -> None:
        self._toy = toy

    async def Ready(  # type: ignore[override]
        self, request: worker_pb2.ReadyRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ReadyReply:
        async with mapped_errors(context):
            if self._toy.hangs_at == "ready":
                await asyncio.Event().wait()
            own = request.source == f"kv of {self._toy.host_id}"
            if self._toy.loses_transfers and not own:
                raise TransferError("the toy was told to lose what it fetches")
            self._toy.told[request.digest] = request.source
            self._toy.was_told.set()
            return worker_pb2.ReadyReply(bytes_moved=0 if own else 64)
        raise AssertionError("an error ends the call")


def _chunks(context_tokens: int) -> list[worker_pb2.Chunk]:
    """Return the chunks of a prompt that is computed with four tokens per step."""
    return [
        worker_pb2.Chunk(first=first, tokens=min(4, context_tokens - first), step_ms=0.5)
        for first in range(0, context_tokens, 4)
    ]
