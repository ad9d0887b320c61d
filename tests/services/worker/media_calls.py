"""A gateway's calls for requests with media."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from paceline.core.media import MediaInput, MediaKind, MediaSpan
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.wire import media_input_to_pb, span_to_pb
from tests.services.worker.conftest import Host

PLACEHOLDER = 7
SIDE = 48
"""Pixels of a side that the smallest encoder of the tests makes one row of."""


def image(rows: int, seed: int = 0) -> MediaInput:
    """Return an image of random pixels whose encoding has this many rows."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, rows * SIDE, 3), dtype=np.uint8)
    return MediaInput(MediaKind.IMAGE, rows, "uint8", pixels.shape, pixels.tobytes())


def prompt_with(images: Sequence[MediaInput], text: Sequence[int] = range(10, 40)) -> tuple[list[int], list[MediaSpan]]:
    """Return a prompt's tokens and spans: the text before, between and after the images."""
    tokens, spans = list(text), []
    for own in images:
        spans.append(MediaSpan(len(tokens), own.length, own.digest, own.kind))
        tokens += [PLACEHOLDER] * own.length + list(text)
    return tokens, spans


def encode_work(
    host: Host, own: MediaInput, name: str = "e", with_input: bool = True, salt: str = ""
) -> common_pb2.Work:
    return common_pb2.Work(
        key=common_pb2.Key(request_id=name, attempt=1, generation=1),
        model=host.model,
        kind=common_pb2.WORK_KIND_ENCODE,
        cache_salt=salt,
        media=[span_to_pb(MediaSpan(0, own.length, own.digest, own.kind))],
        media_input=media_input_to_pb(own) if with_input else None,
    )


@contextlib.asynccontextmanager
async def encoding(
    host: Host, own: MediaInput, role: int = 0, with_input: bool = True, salt: str = ""
) -> AsyncIterator[worker_pb2.ComputeEvent]:
    """Have an image encoded by the prefill (0) or decode (1) worker, and hold the encoding. Yield the last event."""
    call = compute(host, encode_work(host, own, with_input=with_input, salt=salt), role)
    try:
        assert (await call.read()).HasField("opened")
        while (event := await call.read()).HasField("alive"):
            pass
        yield event
    finally:
        call.cancel()


def compute(host: Host, work: common_pb2.Work, role: int = 0) -> Any:
    """Return a call to the prefill (0) or decode (1) worker."""
    return worker_pb2_grpc.ComputeStub(host.channels[role]).Run(work, timeout=60)


@contextlib.asynccontextmanager
async def prefilling(host: Host, images: Sequence[MediaInput]) -> AsyncIterator[tuple[common_pb2.Work, Any]]:
    """Have a prompt with images computed by the prefill worker. Yield its work, and the call after `Opened`."""
    tokens, spans = prompt_with(images)
    work = host.work("m", tokens, 4)
    work.media.extend(map(span_to_pb, spans))
    decode = host.decode_call()
    await decode.write(worker_pb2.DecodeCommand(admit=work))
    work.key.CopyFrom((await decode.read()).admitted.key)
    prefill: Any = host.prefill_stub.Run(worker_pb2.PrefillRequest(work=work, host_id="host"), timeout=60)
    try:
        assert (await prefill.read()).HasField("opened")
        yield work, prefill
    finally:
        prefill.cancel()
        decode.cancel()


async def tell(host: Host, key: common_pb2.Key, own: MediaInput, role: int, source: str = "") -> worker_pb2.ReadyReply:
    """Tell a worker that an encoding is complete."""
    stub = worker_pb2_grpc.MediaStub(host.channels[role])
    source = source or host.prefill.worker.kv.session.source
    reply: worker_pb2.ReadyReply = await stub.Ready(
        worker_pb2.ReadyRequest(key=key, digest=own.digest, source=source), timeout=30
    )
    return reply


async def encode_and_tell(
    host: Host, work: common_pb2.Work, images: Sequence[MediaInput], cached_tokens: int, role: int
) -> None:
    """Have the images encoded that are not in the cached tokens, and tell the worker that reads the encodings."""
    needed = {span.digest: own for own, span in zip(images, work.media) if span.start + span.length > cached_tokens}
    for own in needed.values():
        async with encoding(host, own, role):
            await tell(host, work.key, own, role)


async def generate(
    host: Host, images: Sequence[MediaInput], max_tokens: int = 6, name: str = "m", aggregated: bool = False
) -> list[int]:
    """Run one request with images as the gateway does, and return its tokens."""
    tokens, spans = prompt_with(images)
    work = host.work(name, tokens, max_tokens)
    work.media.extend(map(span_to_pb, spans))
    call = host.decode_call()
    generated: list[int] = []
    try:
        await call.write(worker_pb2.DecodeCommand(admit=work))
        admitted = (await call.read()).admitted
        work.key.CopyFrom(admitted.key)
        if aggregated:
            await call.write(worker_pb2.DecodeCommand(prefill_here=worker_pb2.PrefillHere()))
            await encode_and_tell(host, work, images, admitted.cached_tokens, role=1)
        else:
            prefill: Any = host.prefill_stub.Run(worker_pb2.PrefillRequest(work=work, host_id="host"), timeout=60)
            assert (await prefill.read()).HasField("opened")
            telling = asyncio.create_task(encode_and_tell(host, work, images, admitted.cached_tokens, role=0))
            while not (event := await prefill.read()).HasField("first_token"):
                pass
            await telling
            generated.append(event.first_token.token.id)
            handoff = worker_pb2.Handoff(key=(await prefill.read()).filled.key, first_token_id=generated[0])
            await call.write(worker_pb2.DecodeCommand(handoff=handoff))
        while not (event := await call.read()).HasField("finished"):
            generated += [token.id for token in event.tokens.tokens]
    finally:
        call.cancel()
    return generated
