"""The end of a worker's process: what it waits for, and what it does not."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

import paceline
from paceline.core.errors import UnavailableError
from paceline.core.model_folder import model_digest
from paceline.engine.step import Step, StepResult
from paceline.proto import common_pb2, kvtransfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.services.common.rpc import RpcServer, open_channel
from paceline.services.common.secret import Secret
from paceline.services.gateway.event_feed import EventFeed
from paceline.services.kvtransfer.host_memory import HostOptions
from paceline.services.kvtransfer.service import KVTransferService
from tests.services.worker import stuck_worker
from tests.services.worker.conftest import DecodeCall, Host, StartHost
from tests.tiny_checkpoints import SaveTiny

ROOT = Path(paceline.__file__).parents[1]


class BrokenRunner:
    def execute(self, step: Step) -> StepResult:
        raise RuntimeError("no such instruction")


async def running(host: Host) -> asyncio.Task[object]:
    """A request that decodes for long."""
    task: asyncio.Task[object] = asyncio.create_task(host.generate([5, 6, 7], 3500))
    while host.decode.worker.engine.stats.steps == 0:
        await asyncio.sleep(0.005)
    return task


async def test_nobody_drains_an_engine_that_failed(start_llama: StartHost) -> None:
    async with start_llama() as host:
        request = await running(host)
        draining = asyncio.create_task(host.decode.drain(600))
        while not host.decode.worker.admission.draining:
            await asyncio.sleep(0.005)
        host.decode.worker.engine._runner = BrokenRunner()
        with pytest.raises(UnavailableError, match="no such instruction"):
            await asyncio.wait_for(draining, 20)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def test_nobody_drains_without_blocks(start_llama: StartHost, tmp_path: Path) -> None:
    async with start_llama() as host:
        call = host.decode_call()
        await call.write(worker_pb2.DecodeCommand(admit=work(tmp_path)))
        await call.read()
        draining = asyncio.create_task(host.decode.drain(600))
        await host.service.close()
        await asyncio.wait_for(draining, 20)
        assert host.decode.worker.admission.active == 1  # it waits for a word of the gateway, and would for long
        call.cancel()


async def test_a_process_ends_with_a_step_that_does_not(
    redis_server: str, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    service = KVTransferService(HostOptions("host", 4 << 20, tmp_path, 3, Secret()))
    server = RpcServer("127.0.0.1", 0, Secret())
    kvtransfer_pb2_grpc.add_KVTransferServicer_to_server(service, server.server)
    await service.start()
    kvtransfer = f"127.0.0.1:{await server.start()}"
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", stuck_worker.__name__, str(tmp_path), kvtransfer, redis_server, cwd=ROOT, **pipes
    )
    assert worker.stdout is not None
    assert worker.stderr is not None
    try:
        async with asyncio.timeout(120):
            address = (await worker.stdout.readline()).decode().strip()
            channel = open_channel(address, Secret())
            call = DecodeCall(worker_pb2_grpc.DecodeStub(channel), EventFeed(channel, "the worker"), 60)
            await call.write(worker_pb2.DecodeCommand(admit=work(tmp_path)))
            await call.read()
            await call.write(worker_pb2.DecodeCommand(prefill_here=worker_pb2.PrefillHere()))
            while b"the step begins" not in await worker.stderr.readline():
                pass
            worker.send_signal(signal.SIGTERM)
            while b"does not end" not in (line := await worker.stderr.readline()):
                assert line, "it ended as if nothing could write any more"
            assert await worker.wait() == 1
            await channel.close(None)
            while service.snapshot().counts.in_flight or service.snapshot().counts.held:
                await asyncio.sleep(0.01)
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()
        await service.close()
        await server.close(0)


def work(model: Path) -> common_pb2.Work:
    return common_pb2.Work(
        key=common_pb2.Key(request_id="r", attempt=1, generation=1),
        model=model_digest(model),
        token_ids=[5, 6, 7],
        prompt_tokens=3,
        sampling=common_pb2.Sampling(top_p=1, repetition_penalty=1, max_tokens=5),
    )
