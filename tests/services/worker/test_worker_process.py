"""The end of a worker's process: what it waits for, and what it does not wait for."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from pathlib import Path

import grpc
import pytest
import torch

import paceline
from paceline.core.config import WorkerConfig
from paceline.core.errors import PacelineError, UnavailableError
from paceline.core.model_folder import model_digest, read_model_files
from paceline.core.numerics import Numerics
from paceline.engine.step import Step, StepResult
from paceline.kernels import instruction_set_of, select_kernels
from paceline.models.identity import model_identity
from paceline.proto import common_pb2, kvtransfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.services.common import registry
from paceline.services.common.credentials import Credentials
from paceline.services.common.member_signatures import UNSIGNED
from paceline.services.common.registry import Member, connect, read_members
from paceline.services.common.rpc import RpcServer, is_serving, open_channel
from paceline.services.gateway.fleet.event_feed import EventFeed
from paceline.services.kvtransfer.host_memory import HostOptions
from paceline.services.kvtransfer.service import KVTransferService
from paceline.services.text_worker import add_services
from paceline.services.worker.make_worker import make_worker
from paceline.services.worker.worker_process import WorkerProcess
from tests.services.worker import stuck_worker
from tests.services.worker.conftest import DecodeCall, Host, StartHost
from tests.tiny_checkpoints import SaveTiny

pytestmark = pytest.mark.slow

ROOT = Path(paceline.__file__).parents[1]


async def member(redis_url: str, worker_id: str, state: str) -> Member:
    """Wait until a worker is registered in a state."""
    client = connect(redis_url)
    try:
        async with asyncio.timeout(60):
            while True:
                for each in await read_members(client, "workers", UNSIGNED):
                    if (each.worker_id, each.state) == (worker_id, state):
                        return each
                await asyncio.sleep(0.02)
    finally:
        await client.aclose()


def told(reported: Member) -> dict[str, float]:
    """Return the values of a member's metrics by their figures."""
    return {sample.figure: sample.value for family in reported.metrics for sample in family.samples}


class BrokenRunner:
    def execute(self, step: Step) -> StepResult:
        raise RuntimeError("no such instruction")


async def running(host: Host) -> asyncio.Task[object]:
    """Start a request that decodes for a long time, and wait for its first step."""
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
        host.decode.worker.engine.computing.runner = BrokenRunner()
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
        assert host.decode.worker.admission.active == 1  # it still waits for a command of the gateway
        call.cancel()


async def test_a_worker_is_registered_before_it_can_serve(
    redis_server: str, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        kvtransfer = f"127.0.0.1:{unused.getsockname()[1]}"
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    config = WorkerConfig(
        model=str(link),
        worker_id="early",
        threads=1,
        redis=redis_server,
        cluster="workers",
        kvtransfer_address=kvtransfer,
    )
    starting = asyncio.create_task(
        WorkerProcess.start(config, "decode", make_worker, add_services)
    )  # it waits for kvtransfer
    early = await member(redis_server, "early", "starting")
    assert (early.role, early.model, early.max_model_len) == ("decode", model_digest(tmp_path), 0)
    # From now on the link leads to another model, as after an update of a deployment.
    link.unlink()
    link.symlink_to(tmp_path / "nothing")
    channel = open_channel(early.address, Credentials())
    assert not await is_serving(channel, "early")
    service = KVTransferService(HostOptions("host", 4 << 20, tmp_path, 3, Credentials()))
    server = RpcServer("127.0.0.1", int(kvtransfer.rpartition(":")[2]), Credentials())
    kvtransfer_pb2_grpc.add_KVTransferServicer_to_server(service, server.server)
    await service.start()
    await server.start()
    process = await asyncio.wait_for(starting, 60)
    ready = await member(redis_server, "early", "ready")
    assert (ready.epoch, ready.address, ready.host_id) == (early.epoch, early.address, "host")
    assert ready.max_model_len > 0
    identity = model_identity(tmp_path, "torch.float32")
    assert ready.weights == identity.weights
    assert ready.files == read_model_files(tmp_path).digests
    assert identity.parts == process.worker.layout.parts
    cpu = torch.device("cpu")
    assert ready.numerics == Numerics(instruction_set_of(select_kernels(cpu), cpu), "float32", "none")
    assert await is_serving(channel, "early")
    await channel.close()
    await process.close()
    await service.close()
    await server.close(0)


async def test_a_start_that_fails_leaves_no_member(redis_server: str, tmp_path: Path) -> None:
    config = WorkerConfig(model=str(tmp_path), worker_id="failing", redis=redis_server, cluster="workers", port=0)
    with pytest.raises(PacelineError):
        await WorkerProcess.start(config, "decode", make_worker, add_services)
    client = connect(redis_server)
    assert "failing" not in [each.worker_id for each in await read_members(client, "workers", UNSIGNED)]
    await client.aclose()


async def test_a_draining_worker_says_so_and_finishes_what_it_has(start_llama: StartHost, redis_server: str) -> None:
    async with start_llama() as host:
        early = host.decode_stub.Events(worker_pb2.EventsRequest(stream="before the drain"))
        assert not (await early.read()).draining
        request = asyncio.create_task(host.generate([5, 6, 7], 300))
        while host.decode.worker.engine.stats.steps == 0:
            await asyncio.sleep(0.005)
        draining = asyncio.create_task(host.decode.drain(600))
        assert (await early.read()).draining
        late = host.decode_stub.Events(worker_pb2.EventsRequest(stream="after its begin"))
        assert (await late.read()).draining
        await member(redis_server, host.decode.worker_id, "draining")
        refused = await refusal(host, "newcomer")
        assert (refused.code(), refused.details()) == (grpc.StatusCode.UNAVAILABLE, "this worker is draining")
        assert len((await request).tokens) == 300
        await asyncio.wait_for(draining, 20)
        early.cancel()
        late.cancel()


async def test_figures_of_the_last_request_come_without_a_heartbeat(
    start_llama: StartHost, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "HEARTBEAT_SECONDS", 1000.0)
    async with start_llama() as host:
        for tokens in (20, 5):
            await host.generate([5, 6, 7], tokens)
            for process in (host.prefill, host.decode):
                own = {sample.figure: sample.value for sample in process.worker.engine.stats.samples()}
                assert own["steps"]
                async with asyncio.timeout(60):
                    while told(await member(redis_server, process.worker_id, "ready")).get("steps") != own["steps"]:
                        await asyncio.sleep(0.02)


async def test_what_still_runs_after_the_time_to_drain_is_ended_and_stays_cached(start_llama: StartHost) -> None:
    async with start_llama() as host:
        call = host.decode_call()
        await call.write(worker_pb2.DecodeCommand(admit=host.work("runs", list(range(5, 69)), 3000)))
        await call.read()
        await call.write(worker_pb2.DecodeCommand(prefill_here=worker_pb2.PrefillHere()))
        while not (await call.read()).HasField("tokens"):
            pass
        waits = host.decode_call()  # waits for a handoff, which does not come
        await waits.write(worker_pb2.DecodeCommand(admit=host.work("waits", [5, 6, 7], 5)))
        await waits.read()
        await asyncio.wait_for(host.decode.drain(0), 20)
        for ended in (call, waits):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await read_all(ended)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert error.value.details() == "this worker is draining"
        await host.decode.close()
        assert await host.all_blocks_back()
        assert (await host.ledger()).cached >= 4  # the prompt's blocks, which the next attempt of the request can reuse
        call.cancel()
        waits.cancel()


async def test_a_process_ends_with_a_step_that_does_not(
    redis_server: str, save_llama: SaveTiny, tmp_path: Path
) -> None:
    save_llama()
    service = KVTransferService(HostOptions("host", 4 << 20, tmp_path, 3, Credentials()))
    server = RpcServer("127.0.0.1", 0, Credentials())
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
            channel = open_channel(address, Credentials())
            call = DecodeCall(worker_pb2_grpc.DecodeStub(channel), EventFeed(channel, "the worker"), 60)
            await call.write(worker_pb2.DecodeCommand(admit=work(tmp_path)))
            await call.read()
            await call.write(worker_pb2.DecodeCommand(prefill_here=worker_pb2.PrefillHere()))
            while b"the step begins" not in await worker.stderr.readline():
                pass
            worker.send_signal(signal.SIGTERM)
            while b"does not end" not in (line := await worker.stderr.readline()):
                assert line, "the process ended without a message"
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


async def read_all(call: DecodeCall) -> None:
    """Read the events of a call until it fails."""
    while True:
        await call.read()


async def refusal(host: Host, request_id: str) -> grpc.aio.AioRpcError:
    """Return the error with which the decode worker refuses a request."""
    call = host.decode_call()
    await call.write(worker_pb2.DecodeCommand(admit=host.work(request_id, [5, 6, 7])))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    call.cancel()
    return refused.value


def work(model: Path) -> common_pb2.Work:
    return common_pb2.Work(
        key=common_pb2.Key(request_id="r", attempt=1, generation=1),
        model=model_digest(model),
        token_ids=[5, 6, 7],
        prompt_tokens=3,
        sampling=common_pb2.Sampling(top_p=1, repetition_penalty=1, max_tokens=5),
    )
