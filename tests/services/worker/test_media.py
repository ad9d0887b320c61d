"""Encodings on workers: computed once, held while a prompt reads them, and given back on every path."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paceline.core.media import MediaInput
from paceline.core.types import Key
from paceline.proto import common_pb2, kvtransfer_pb2, worker_pb2
from paceline.services.common.wire import media_input_to_pb, span_to_pb
from tests.services.worker.conftest import PATIENCE, Host, StartHost
from tests.services.worker.media_calls import (
    compute,
    encode_work,
    encoding,
    generate,
    image,
    prefilling,
    prompt_with,
    tell,
)
from tests.tiny_checkpoints import write_gemma4_with_media

KV_MEMORY = 16 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    write_gemma4_with_media(folder, "edge")
    return folder


@pytest.fixture
def start(start_host: StartHost, checkpoint: Path) -> StartHost:
    """Return a function that starts a host for a tiny model with encoders."""
    return functools.partial(start_host, checkpoint, kv_memory=KV_MEMORY, dtype="float32")


async def test_an_encoding_is_computed_once_and_then_found(start: StartHost) -> None:
    async with start() as host:
        own = image(3)
        async with encoding(host, own, with_input=False) as event:
            assert event.HasField("input_needed")
        for role, cached in ((0, False), (0, True), (1, True)):
            async with encoding(host, own, role, with_input=role == 0) as event:
                assert event.encoded.cached is cached
                assert event.encoded.bytes == 3 * 40 * 4
                assert (await host.ledger()).used_by_group["encoding"] == 1
        assert await host.all_blocks_back()
        figures = {sample.figure: sample.value for sample in host.prefill.worker.samples()}
        assert (figures["encodings_computed"], figures["encodings_cached"]) == (1, 1)
        assert figures["encode_seconds"] > 0


async def test_a_lookup_needs_no_free_blocks(start: StartHost) -> None:
    async with start() as host:
        kv, layout = host.prefill.worker.kv, host.prefill.worker.layout.part(encoding=True)
        rows = (await host.ledger()).free * layout.groups[0].block_tokens
        await kv.reserve(Key("all blocks", 1, 1), [], rows, 0, encoding=True)
        async with encoding(host, image(3), with_input=False) as event:
            assert event.HasField("input_needed")
        kv.release(Key("all blocks", 1, 1))
        assert await host.all_blocks_back()


async def test_requests_for_the_same_encoding_share_its_computation(start: StartHost) -> None:
    async with start() as host:
        own = image(5)

        async def cached(salt: str) -> tuple[str, bool]:
            async with encoding(host, own, salt=salt) as event:
                return salt, bool(event.encoded.cached)

        found = await asyncio.gather(*(cached(salt) for salt in ("alice", "alice", "bob", "alice")))
        assert sorted(found) == [("alice", False), ("alice", True), ("alice", True), ("bob", False)]
        assert await host.all_blocks_back()


async def test_a_prompt_with_images_is_computed_by_either_worker(start: StartHost) -> None:
    async with start(max_batched_tokens=32, max_seqs=4) as host:
        images = [image(2, seed=1), image(9, seed=2), image(2, seed=1)]
        expected = await generate(host, images, name="apart")
        assert await host.all_blocks_back()
        await host.kv_stub.ResetCache(kvtransfer_pb2.ResetCacheRequest())
        assert await generate(host, images, name="aggregated", aggregated=True) == expected
        assert await generate(host, images, name="again") == expected
        others = [image(2, seed=3), *images[1:]]
        assert await generate(host, others, name="other image") != expected
        assert await host.all_blocks_back()


async def test_tokens_before_an_image_are_computed_before_its_encoding_comes(start: StartHost) -> None:
    async with start(max_batched_tokens=16, max_seqs=4) as host:
        own = image(4)
        before = prompt_with([own])[1][0].start
        async with prefilling(host, [own]) as (work, prefill):
            computed = 0
            while computed < before:
                event = await prefill.read()
                computed = max([computed, *(chunk.first + chunk.tokens for chunk in event.report.chunks)])
            assert computed == before
            async with encoding(host, own):
                await tell(host, work.key, own, role=0)
            while not (await prefill.read()).HasField("first_token"):
                pass
        assert await host.all_blocks_back()


async def test_encodings_are_given_back_when_the_prompt_is_computed(start: StartHost) -> None:
    async with start() as host:
        own = image(4)
        tokens, spans = prompt_with([own])
        work = host.work("m", tokens, 3000)
        work.media.extend(map(span_to_pb, spans))
        call = host.decode_call()
        await call.write(worker_pb2.DecodeCommand(admit=work))
        await call.read()
        await call.write(worker_pb2.DecodeCommand(prefill_here=worker_pb2.PrefillHere()))
        async with encoding(host, own, role=1):
            await tell(host, work.key, own, role=1)
        while not (await call.read()).HasField("tokens"):
            pass
        async with asyncio.timeout(PATIENCE):  # the call that computed the encoding may still be ending
            while (await host.ledger()).used_by_group["encoding"]:
                await asyncio.sleep(0.01)
        assert host.decode.worker.requests == 1
        call.cancel()
        assert await host.all_blocks_back()


async def test_a_request_that_leaves_gives_its_encodings_back(start: StartHost) -> None:
    async with start() as host:
        own, missing = image(4, seed=1), image(4, seed=2)
        async with prefilling(host, [own, missing]) as (work, _):
            async with encoding(host, own):
                await tell(host, work.key, own, role=0)
            while (await host.ledger()).used_by_group["encoding"] > 1:
                await asyncio.sleep(0.01)
        assert await host.all_blocks_back()
        with pytest.raises(grpc.aio.AioRpcError, match="does not compute") as error:
            await tell(host, work.key, missing, role=0)
        assert error.value.code() is grpc.StatusCode.ABORTED


async def test_an_encoding_that_is_not_there_is_reported(start: StartHost) -> None:
    async with start() as host:
        own = image(4)
        async with prefilling(host, [own]) as (work, _):
            with pytest.raises(grpc.aio.AioRpcError, match="evicted") as error:
                await tell(host, work.key, own, role=0)
            assert error.value.code() is grpc.StatusCode.ABORTED
            with pytest.raises(grpc.aio.AioRpcError, match="no span") as error:
                await tell(host, work.key, image(4, seed=9), role=0)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await host.all_blocks_back()


def _use_int64(work: common_pb2.Work) -> None:
    """Give an input of a type that no encoder takes, under its right name."""
    own = image(2)
    wrong = MediaInput(own.kind, own.length, "int64", own.shape, bytes(8 * len(own.data)))
    work.media_input.CopyFrom(media_input_to_pb(wrong))
    work.media[0].digest = wrong.digest


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda work: work.media_input.ClearField("data"), "does not have 0 bytes|not the one"),
        (lambda work: work.media[0].ClearField("digest"), "digest"),
        (_use_int64, "type 'int64' cannot be read"),
        (lambda work: work.media.pop(), "one span"),
        (lambda work: work.token_ids.append(1), "no tokens"),
        (lambda work: setattr(work.media[0], "length", 100_000), "at most"),
        (lambda work: setattr(work, "kind", 99), "does not know work of kind 99"),
    ],
)
async def test_wrong_work_is_refused(start: StartHost, change: Callable[[common_pb2.Work], object], why: str) -> None:
    async with start() as host:
        work = encode_work(host, image(2))
        change(work)
        with pytest.raises(grpc.aio.AioRpcError, match=why) as error:
            async for _ in compute(host, work):
                pass
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await host.all_blocks_back()


async def test_an_input_that_the_encoder_cannot_read_fails_alone(start: StartHost) -> None:
    async with start() as host:
        own = image(2)
        wrong = type(own)(own.kind, 3, own.dtype, own.shape, own.data)
        with pytest.raises(grpc.aio.AioRpcError, match="gives 2 rows for an input of 3 tokens"):
            async for _ in compute(host, encode_work(host, wrong)):
                pass
        assert await host.all_blocks_back()
        async with encoding(host, own) as event:
            assert event.HasField("encoded")


async def test_work_that_is_cancelled_leaves_no_block(start: StartHost) -> None:
    async with start() as host:
        calls = [compute(host, encode_work(host, image(8, seed))) for seed in range(6)]
        for call in calls:
            await call.read()
        for call in calls:
            call.cancel()
        assert await host.all_blocks_back()
        async with encoding(host, image(8)) as event:
            assert event.HasField("encoded")


async def test_a_draining_worker_encodes_for_its_own_requests_only(start: StartHost) -> None:
    async with start() as host:
        own = image(4)
        async with prefilling(host, [own]) as (work, prefill):
            host.prefill.worker.admission.begin_drain()
            with pytest.raises(grpc.aio.AioRpcError, match="draining"):
                async for _ in compute(host, encode_work(host, own, name="another")):
                    pass
            encode = encode_work(host, own)
            encode.key.CopyFrom(work.key)
            call = compute(host, encode)
            while not (await call.read()).HasField("encoded"):
                pass
            await tell(host, work.key, own, role=0)
            call.cancel()
            while not (await prefill.read()).HasField("filled"):
                pass
        assert await host.all_blocks_back()


async def test_preempted_requests_read_their_images_again(start: StartHost) -> None:
    cases = [[image(6, seed)] for seed in range(6)]
    async with start() as host:
        expected = [await generate(host, images, 150, f"r{index}") for index, images in enumerate(cases)]
        layout = host.decode.worker.layout
        prompt = len(prompt_with(cases[0])[0])
    # Requests need fewer blocks when their prompts are computed, because of the window. So more of them are admitted
    # than have room at their ends.
    kv_memory = int(2.4 * layout.slots_for(prompt + 64)) * layout.slot_bytes

    async def eventually(host: Host, index: int) -> list[int]:
        for attempt in range(2000):
            try:
                return await generate(host, cases[index], 150, f"r{index} {attempt}")
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED):
                    raise
                await asyncio.sleep(0.01)
        raise AssertionError("it never ended")

    async with start(kv_memory=kv_memory, max_model_len=256) as host:
        assert await asyncio.gather(*(eventually(host, index) for index in range(len(cases)))) == expected
        assert host.decode.worker.engine.stats.preemptions > 0
        assert await host.all_blocks_back()
