"""An encode worker: encoders alone, in the arena of workers with the whole model."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch

from paceline.core.config import WorkerConfig
from paceline.core.errors import ConfigError
from paceline.core.speculative import parse_speculative_config
from paceline.engine.loading import load, load_encoders_alone
from paceline.kernels.reference import ReferenceKernels
from paceline.proto import common_pb2, worker_pb2_grpc
from paceline.proto.fleet_pb2 import LoadReport
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import open_channel
from paceline.services.encode.main import add_encode
from paceline.services.encode.worker import EncodeWorker, make_worker
from paceline.services.worker.encoder import WorkerEncoder
from paceline.services.worker.worker_process import WorkerProcess
from tests.services.worker.conftest import Host, StartHost
from tests.services.worker.media_calls import encode_work, encoding, image, prefilling, tell
from tests.tiny_checkpoints import write_gemma4_with_media, write_tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    write_gemma4_with_media(folder, "edge")
    return folder


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft model"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_layout_is_that_of_workers_with_the_whole_model(
    checkpoint: Path, tmp_path: Path, drafter: str, quantization: Any
) -> None:
    config = ""
    if drafter == "ngram":
        config = '{"method": "ngram", "num_speculative_tokens": 3}'
    if drafter == "draft model":
        write_tiny(tmp_path, "llama", vocab_size=103)
        config = f'{{"model": "{tmp_path}", "num_speculative_tokens": 3}}'
    how = (torch.float32, CPU, ReferenceKernels(), parse_speculative_config(config), None, quantization)
    whole, alone = load(checkpoint, *how), load_encoders_alone(checkpoint, *how)
    assert alone.layout == whole.layout
    assert alone.layout.encodings is not None
    assert alone.max_position == whole.max_position


def test_a_model_without_encoders_needs_no_encode_worker(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    with pytest.raises(ConfigError, match="has no encoders"):
        load_encoders_alone(tmp_path, torch.float32, CPU, ReferenceKernels(), None)


@pytest.fixture
async def pair(
    start_host: StartHost, checkpoint: Path, redis_server: str
) -> AsyncIterator[tuple[Host, WorkerProcess[EncodeWorker]]]:
    """A host with a prefill, a decode and an encode worker."""
    async with functools.partial(start_host, checkpoint, kv_memory=16 << 20, dtype="float32")() as host:
        config = WorkerConfig(
            model=str(checkpoint),
            dtype="float32",
            threads=1,
            max_seqs=2,
            redis=redis_server,
            cluster="workers",
            kvtransfer_address=host.decode.worker.kv.session.address,
        )
        process = await WorkerProcess.start(config, "encode", make_worker, add_encode)
        host.channels.append(open_channel(process.address, Credentials()))
        try:
            yield host, process
        finally:
            await process.drain(10)
            await process.close()


async def test_a_prefill_worker_reads_what_an_encode_worker_has_computed(
    pair: tuple[Host, WorkerProcess[EncodeWorker]],
) -> None:
    host, process = pair
    own, role = image(5), len(host.channels) - 1
    async with prefilling(host, [own]) as (work, prefill):
        async with encoding(host, own, role) as event:
            assert not event.encoded.cached
            reply = await tell(host, work.key, own, role=0, source=event.encoded.source)
            assert reply.bytes_moved == 0
        while not (await prefill.read()).HasField("filled"):
            pass
    assert await host.all_blocks_back()
    figures = {sample.figure: sample.value for sample in process.worker.samples()}
    assert figures["encodings_computed"] == 1
    assert figures["encode_seconds"] > figures["busy_seconds"] == 0


async def test_an_encode_worker_does_nothing_else(pair: tuple[Host, WorkerProcess[EncodeWorker]]) -> None:
    host, process = pair
    stub = worker_pb2_grpc.ComputeStub(host.channels[-1])
    score = host.work("s", [3, 4], prompt_logprobs=0)
    score.kind = common_pb2.WORK_KIND_SCORE
    with pytest.raises(grpc.aio.AioRpcError, match="does not know work of kind 2") as error:
        async for _ in stub.Run(score):
            pass
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    work = encode_work(host, image(2))
    work.model = "another"
    with pytest.raises(grpc.aio.AioRpcError, match="another model"):
        async for _ in stub.Run(work):
            pass
    process.worker.admission.begin_drain()
    with pytest.raises(grpc.aio.AioRpcError, match="draining"):
        async for _ in stub.Run(encode_work(host, image(2))):
            pass


async def test_work_that_waits_after_its_call_has_ended_is_not_counted_as_running(
    pair: tuple[Host, WorkerProcess[EncodeWorker]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, process = pair
    monkeypatch.setattr(WorkerEncoder, "waiting", 3)
    assert process.worker.load() == LoadReport(running=0, waiting=3)
