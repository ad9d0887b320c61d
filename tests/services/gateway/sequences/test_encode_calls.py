"""Encodings of requests with images, against toy workers."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from paceline.core.config import GatewayConfig
from paceline.core.context import encoding_context
from paceline.core.errors import BusyError, InvalidRequestError
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.core.media import MediaInput, MediaKind, MediaSpan
from paceline.core.types import FinishReason, SamplingParams
from paceline.proto import common_pb2
from paceline.services.common.wire import span_to_pb
from paceline.services.gateway.routing.encode_router import EncodingIndex
from paceline.services.gateway.routing.prefix_index import IndexedBlocks, PrefixIndex
from paceline.services.gateway.sequences import encode_calls
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.encode_calls import AttemptMedia, EncodeCalls
from paceline.services.gateway.sequences.notices import PlacementLog
from paceline.services.gateway.sequences.progress import Ended, Event, Generated
from paceline.services.gateway.sequences.runner import SequenceRunner
from paceline.services.gateway.sequences.worker_call import WorkerFailedError
from tests.services.gateway.conftest import PATIENCE, Cluster, eventually
from tests.services.gateway.toy_calls import ADMISSION, Call
from tests.services.gateway.toy_plans import toy_sequence
from tests.services.gateway.toy_workers import ToyWorker

ROWS = 4


def image(number: int) -> MediaInput:
    return MediaInput(MediaKind.IMAGE, ROWS, "uint8", (2, 1, 3), bytes([number] * 6))


class Request:
    """A request with images that runs in the background.

    Args:
        images: numbers of the images; each one comes after `gap` tokens of text.
    """

    def __init__(
        self,
        runner: SequenceRunner,
        images: list[int],
        gap: int = 17,
        kind: int = common_pb2.WORK_KIND_GENERATE,
        name: str = "r",
        salt: str = "",
    ) -> None:
        self.inputs = [image(number) for number in images]
        spans = [
            MediaSpan(gap + index * (gap + ROWS), ROWS, own.digest, own.kind) for index, own in enumerate(self.inputs)
        ]
        scores = 0 if kind == common_pb2.WORK_KIND_SCORE else None
        self.sequence = toy_sequence(
            [1] * (len(images) * (gap + ROWS) + 1),
            SamplingParams(max_tokens=9, prompt_logprobs=scores),
            request_id=name,
            cache_salt=salt,
            media=tuple(spans),
            inputs=tuple(self.inputs),
            kind=kind,
        )
        self.events: list[Event] = []
        self.task = asyncio.create_task(self._run(runner))

    async def _run(self, runner: SequenceRunner) -> list[int]:
        """Return the tokens."""
        await runner.run(self.sequence, self.events.append)
        assert self.events[-1] == Ended(FinishReason.LENGTH)
        return [token.id for event in self.events if isinstance(event, Generated) for token in event.tokens]

    @property
    def digests(self) -> list[bytes]:
        return [own.digest for own in self.inputs]


def runner_of(cluster: Cluster, prefixes: PrefixIndex | None = None, queue_seconds: float = PATIENCE) -> SequenceRunner:
    config = GatewayConfig(queue_seconds=queue_seconds, stall_seconds=PATIENCE)
    return SequenceRunner(config, cluster.fleet, PlacementLog(cluster.redis, cluster.name), prefixes or PrefixIndex())


def encodings(worker: ToyWorker) -> list[Call]:
    return [call for call in worker.calls if call.work.kind == common_pb2.WORK_KIND_ENCODE]


async def test_the_prefill_worker_encodes_each_image_once(cluster: Cluster) -> None:
    decode, prefill = await cluster.add("d"), await cluster.add("p", "prefill")
    request = Request(runner_of(cluster), [1, 2, 1], salt="alice")
    assert len(await request.task) == 9
    assert {call.work.cache_salt for call in encodings(prefill)} == {"alice"}
    assert [call.work.media_input.data for call in encodings(prefill)] == [own.data for own in request.inputs[:2]]
    assert prefill.told == dict.fromkeys(request.digests, "kv of host")
    assert not encodings(decode)
    await eventually(lambda: prefill.active == 0)
    (attempt,) = request.sequence.trace.tries
    assert [(each.worker, each.tokens, each.cached) for each in attempt.encodings] == [("p", ROWS, False)] * 2


async def test_a_decode_worker_without_a_prefill_fleet_encodes_itself(cluster: Cluster) -> None:
    decode = await cluster.add("d")
    request = Request(runner_of(cluster), [1])
    assert len(await request.task) == 9
    assert decode.told.keys() == set(request.digests)


async def test_logprobs_of_a_prompt_with_images(cluster: Cluster) -> None:
    await cluster.add("d")
    prefill = await cluster.add("p", "prefill")
    request = Request(runner_of(cluster), [1, 2], kind=common_pb2.WORK_KIND_SCORE)
    assert await request.task == []
    assert prefill.told.keys() == set(request.digests)


async def test_images_in_the_cached_prefix_are_not_encoded(cluster: Cluster) -> None:
    await cluster.add("d")
    prefill = await cluster.add("p", "prefill")
    request = Request(runner_of(cluster), [1, 2], gap=8)  # 16 tokens are cached
    assert len(await request.task) == 9
    assert prefill.told.keys() == {request.digests[1]}


async def test_encode_workers_share_images_and_the_reader_learns_their_host(cluster: Cluster) -> None:
    await cluster.add("d")
    prefill = await cluster.add("p", "prefill")
    near, far = await cluster.add("e1", "encode"), await cluster.add("e2", "encode", host_id="far")
    request = Request(runner_of(cluster), [1, 2, 3, 4])
    assert len(await request.task) == 9
    assert {len(encodings(near)), len(encodings(far))} == {2}
    assert not encodings(prefill)
    assert sorted(prefill.told.values()) == ["kv of far"] * 2 + ["kv of host"] * 2
    moved = {each.worker: each.bytes_moved for each in request.sequence.trace.tries[0].encodings}
    assert moved == {"e1": 0, "e2": 64}


async def test_who_refuses_to_encode_is_left_out(cluster: Cluster) -> None:
    await cluster.add("d")
    prefill, encode = await cluster.add("p", "prefill"), await cluster.add("e", "encode", max_seqs=0)
    request = Request(runner_of(cluster), [1])
    assert len(await request.task) == 9
    assert encode.outcomes() == ["refused"]
    assert len(encodings(prefill)) == 1
    assert request.sequence.progress.attempts == 1


async def test_a_full_encoder_costs_a_pause_and_no_attempt(cluster: Cluster) -> None:
    await cluster.add("d")
    prefill = await cluster.add("p", "prefill", max_seqs=1)
    request = Request(runner_of(cluster), [1])
    await eventually(lambda: len(encodings(prefill)) == 2)
    prefill.max_seqs = 2
    assert len(await request.task) == 9
    assert (request.sequence.progress.failures.count, request.sequence.progress.failed) == (0, frozenset())
    assert request.sequence.progress.refused_since is None


async def test_encoders_that_stay_full_end_the_request(cluster: Cluster) -> None:
    await cluster.add("d")
    await cluster.add("p", "prefill", max_seqs=1)
    request = Request(runner_of(cluster, queue_seconds=0.2), [1])
    with pytest.raises(BusyError, match="no worker had room for an image"):
        await request.task


def calls_for(cluster: Cluster, inputs: dict[bytes, MediaInput], stall_seconds: float = PATIENCE) -> EncodeCalls:
    """Return the calls of an attempt with image 1."""
    work = common_pb2.Work(media=[span_to_pb(MediaSpan(0, ROWS, image(1).digest, MediaKind.IMAGE))])
    media = AttemptMedia(inputs, EncodingIndex(PrefixIndex()))
    return EncodeCalls(
        cluster.fleet, media, work, seconds=PATIENCE, stall_seconds=stall_seconds, attempt_trace=AttemptTrace(ahead=0)
    )


async def test_a_reader_that_the_fleet_has_dropped_still_encodes(cluster: Cluster) -> None:
    prefill = await cluster.add("p", "prefill")
    reader = cluster.fleet.worker("p")
    del cluster.fleet._workers["p"]
    calls = calls_for(cluster, {image(1).digest: image(1)})
    calls.start(reader, 0, lambda error: None)
    await eventually(lambda: bool(prefill.told))
    assert calls.error is None
    calls.close()
    await reader.close()


async def test_an_unexpected_error_fails_the_attempt_and_is_logged(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.add("p", "prefill")
    calls, errors = calls_for(cluster, {}), list[Exception]()
    calls.start(cluster.fleet.worker("p"), 0, errors.append)
    await eventually(lambda: bool(errors))
    assert isinstance(errors[0], WorkerFailedError)
    assert "unexpected error" in caplog.text


@pytest.mark.parametrize(("stage", "told"), [("encode", "was silent for 0.1 s"), ("ready", "did not answer in time")])
async def test_a_call_that_hangs_is_given_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, stage: str, told: str
) -> None:
    prefill = await cluster.add("p", "prefill")
    prefill.hangs_at = stage
    monkeypatch.setattr(encode_calls, "READY_SECONDS", 0.1)
    calls, errors = calls_for(cluster, {image(1).digest: image(1)}, stall_seconds=0.1), list[Exception]()
    calls.start(cluster.fleet.worker("p"), 0, errors.append)
    await eventually(lambda: bool(errors))
    assert isinstance(errors[0], WorkerFailedError)
    assert told in str(errors[0])


async def test_a_call_that_was_cancelled_fails_the_attempt(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task group would take it for a success, and the reader would wait for the encoding for ever."""

    async def ask(*arguments: object, **options: object) -> None:
        raise asyncio.CancelledError

    await cluster.add("p", "prefill")
    monkeypatch.setattr(EncodeCalls, "_ask", ask)
    calls, errors = calls_for(cluster, {}), list[Exception]()
    calls.start(cluster.fleet.worker("p"), 0, errors.append)
    await eventually(lambda: bool(errors))
    assert isinstance(calls.error, WorkerFailedError)


async def test_an_encode_worker_that_is_gone_costs_no_attempt(cluster: Cluster) -> None:
    await cluster.add("d")
    prefill, encode = await cluster.add("p", "prefill"), await cluster.add("e", "encode")
    encode.fail_after = ADMISSION
    request = Request(runner_of(cluster), [1])
    assert len(await request.task) == 9
    assert len(encodings(prefill)) == 1
    assert request.sequence.progress.attempts == 1


async def test_an_encoder_that_fails_costs_an_attempt_and_another_one_goes_on(cluster: Cluster) -> None:
    decode = await cluster.add("d")
    prefill, encode = await cluster.add("p", "prefill"), await cluster.add("e", "encode")
    encode.fails_to_encode = True
    request = Request(runner_of(cluster), [1, 2])
    assert len(await request.task) == 9
    assert request.sequence.progress.failures.count == 1
    assert "encode worker e has ended" in request.sequence.trace.tries[0].failure
    assert sorted(call.work.key.attempt for call in encodings(prefill)) == [2, 2]
    assert decode.active == 0
    await eventually(lambda: prefill.active == encode.active == 0)


async def test_a_transfer_that_fails_is_the_fault_of_the_link(cluster: Cluster) -> None:
    await cluster.add("d")
    prefill, far = await cluster.add("p", "prefill"), await cluster.add("e", "encode", host_id="far")
    prefill.loses_transfers = True
    request = Request(runner_of(cluster), [1])
    assert len(await request.task) == 9
    assert request.sequence.progress.failures.count == 0
    assert (len(encodings(far)), len(encodings(prefill))) == (1, 1)
    assert cluster.fleet.failed_links() == {("far", "host")}


async def test_a_host_that_has_an_encoding_gets_no_input(cluster: Cluster) -> None:
    await cluster.add("d")
    prefill = await cluster.add("p", "prefill")
    layout = make_layout((GroupShape("full", (0,), 1, 16, 0),), 2, "model", encoding_size=32)
    context = encoding_context(image(1).digest, ROWS, "", layout)
    prefixes, known = PrefixIndex(), [[], list(context.links(layout.fingerprint))]
    prefixes.replace("host", IndexedBlocks("pool", 0, layout, known))
    assert EncodingIndex(prefixes).hosts(MediaSpan(0, ROWS, image(1).digest, MediaKind.IMAGE), "") == {"host"}
    prefill.encodings.add(image(1).digest)
    assert len(await Request(runner_of(cluster, prefixes), [1]).task) == 9
    assert [call.work.HasField("media_input") for call in encodings(prefill)] == [False]
    # The index may be wrong.
    prefill.encodings.clear()
    assert len(await Request(runner_of(cluster, prefixes), [1]).task) == 9
    assert [call.work.HasField("media_input") for call in encodings(prefill)] == [False, False, True]


async def test_requests_with_the_same_image_share_its_computation(cluster: Cluster) -> None:
    await cluster.add("d")
    await cluster.add("p", "prefill")
    encoders = [await cluster.add(name, "encode") for name in ("e1", "e2")]
    for encoder in encoders:
        encoder.pause_after = ADMISSION
    runner = runner_of(cluster)
    requests = [Request(runner, [1], name=f"r{index}") for index in range(3)]
    await eventually(lambda: sum(len(encoder.calls) for encoder in encoders) == 3)
    for encoder in encoders:
        encoder.resume.set()
    for request in requests:
        assert len(await request.task) == 9
    (busy,) = [encoder for encoder in encoders if encoder.calls]
    assert sum(call.work.HasField("media_input") for call in busy.calls) < len(busy.calls)
    assert runner.starter.encodings.workers(requests[0].sequence.prompt.media[0], "") == frozenset()


async def test_who_leaves_ends_all_calls(cluster: Cluster) -> None:
    decode, prefill = await cluster.add("d"), await cluster.add("p", "prefill")
    encode = await cluster.add("e", "encode")
    encode.pause_after = ADMISSION
    request = Request(runner_of(cluster), [1, 2, 3])
    await eventually(lambda: len(encode.calls) == 2)  # the third one waits in the gateway
    request.task.cancel()
    await asyncio.gather(request.task, return_exceptions=True)
    await eventually(lambda: decode.active == prefill.active == encode.active == 0)
    assert encode.outcomes() == ["cancelled", "cancelled"]
    worker = cluster.fleet.worker("e")
    assert (worker.encodings, worker.is_called) == (0, False)


async def test_an_input_that_no_encoder_can_read_ends_the_request(cluster: Cluster) -> None:
    await cluster.add("d")
    prefill, encode = await cluster.add("p", "prefill"), await cluster.add("e", "encode")
    encode.fail_after, encode.fail_code = ADMISSION, grpc.StatusCode.INVALID_ARGUMENT
    request = Request(runner_of(cluster), [1])
    with pytest.raises(InvalidRequestError):
        await request.task
    await eventually(lambda: prefill.active == 0)


def test_an_encoding_under_way_belongs_to_its_owner() -> None:
    index, span = EncodingIndex(PrefixIndex()), MediaSpan(0, ROWS, image(1).digest, MediaKind.IMAGE)
    with index.computing(span, "alice", "p"), index.computing(span, "bob", "q"):
        assert [index.workers(span, salt) for salt in ("alice", "bob", "")] == [{"p"}, {"q"}, frozenset()]
