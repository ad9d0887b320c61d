from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.adapters import Adapter
from paceline.core.config import WorkerConfig
from paceline.proto import common_pb2, kvtransfer_pb2, kvtransfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import RpcServer, open_channel
from paceline.services.common.wire import adapter_to_pb, token_to_pb, work_model
from paceline.services.gateway.fleet.event_feed import EventFeed, Inbox
from paceline.services.kvtransfer.host_memory import HostOptions
from paceline.services.kvtransfer.service import KVTransferService
from paceline.services.text_worker import add_services
from paceline.services.worker.make_worker import make_worker
from paceline.services.worker.worker import Worker
from paceline.services.worker.worker_process import WorkerProcess
from tests.services.worker.unreliable_host import UnreliableHost, start_unreliable_host
from tests.tiny_checkpoints import SaveTiny

PROMPT_VOCABULARY = 100
PATIENCE = 20.0
"""Seconds after which a test no longer waits and fails."""


@dataclass
class Outcome:
    tokens: list[int]
    cached_tokens: int
    scores: list[common_pb2.Token]
    alive: int = 0
    """Number of events in which the prefill worker said that the request goes on."""
    admitted: worker_pb2.Admitted | None = None
    reports: list[worker_pb2.Report] = field(default_factory=list)

    def note(self, event: Any) -> Any:
        """Keep the report of an event, if it has one, and return the event."""
        if event.HasField("report"):
            self.reports.append(event.report)
        return event

    def chunks(self) -> list[tuple[int, int]]:
        """Return (first, tokens) of every step that computed a part of the context."""
        return [(chunk.first, chunk.tokens) for report in self.reports for chunk in report.chunks]

    def effort(self) -> worker_pb2.Effort:
        """Return the newest effort that a worker has reported."""
        return [report.effort for report in self.reports if report.HasField("effort")][-1]


class Clock:
    """The clock of kvtransfer. A test may set it forward by `ahead` seconds."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class DecodeCall:
    """A gateway's call to a decode worker. `read` returns the admission first, and then the events of the feed."""

    def __init__(self, stub: worker_pb2_grpc.DecodeStub, feed: EventFeed, timeout: float) -> None:
        self._call: Any = stub.Generate(timeout=timeout)
        self._feed = feed
        self._events = Inbox()
        self._recipient = worker_pb2.Recipient()
        self._ending: asyncio.Task[object] | None = None

    async def write(self, command: worker_pb2.DecodeCommand) -> None:
        if command.HasField("admit"):
            self._recipient = await self._feed.join(self._events)
            command.recipient.CopyFrom(self._recipient)
        await self._call.write(command)

    async def read(self) -> worker_pb2.DecodeEvent:
        if self._ending is None:
            event = await self._call.read()
            self._ending = asyncio.create_task(self._call.read())
            return event
        event = await self._events.get()
        if isinstance(event, list):
            tokens = worker_pb2.Tokens(tokens=[token_to_pb(token) for token in event])
            return worker_pb2.DecodeEvent(attempt=self._recipient.attempt, tokens=tokens)
        if isinstance(event, Exception):
            raise event
        if event.WhichOneof("event") is None:
            await self._ending
        return event

    def cancel(self) -> None:
        self._feed.leave(self._recipient)
        if self._ending is not None:
            self._ending.cancel()
        self._call.cancel()


class Host:
    """A host with a prefill and a decode worker, real servers and a real arena, all in this process."""

    def __init__(
        self,
        prefill: WorkerProcess[Worker],
        decode: WorkerProcess[Worker],
        kvtransfer: str,
        service: KVTransferService,
        clock: Clock,
    ) -> None:
        self.service = service
        self.clock = clock
        self.prefill = prefill
        self.decode = decode
        self.model = decode.worker.model_id
        self.channels = [
            open_channel(address, Credentials()) for address in (prefill.address, decode.address, kvtransfer)
        ]
        self.prefill_stub = worker_pb2_grpc.PrefillStub(self.channels[0])
        self.decode_stub = worker_pb2_grpc.DecodeStub(self.channels[1])
        self.feed = EventFeed(self.channels[1], "the decode worker", decode.socket)
        self.kv_stub = kvtransfer_pb2_grpc.KVTransferStub(self.channels[2])

    def work(
        self, request_id: str, token_ids: Sequence[int], max_tokens: int = 8, **sampling: object
    ) -> common_pb2.Work:
        """Return the work of a request's first attempt."""
        params = common_pb2.Sampling(top_p=1, repetition_penalty=1, max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        key = common_pb2.Key(request_id=request_id, attempt=1, generation=1)
        return common_pb2.Work(
            key=key, model=self.model, token_ids=token_ids, prompt_tokens=len(token_ids), sampling=params
        )

    def decode_call(self, timeout: float = 60) -> DecodeCall:
        return DecodeCall(self.decode_stub, self.feed, timeout)

    async def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        aggregated: bool = False,
        cancel_after: int | None = None,
        tails: Sequence[int] = (),
        kept: int = 0,
        adapter: Adapter | None = None,
        **sampling: object,
    ) -> Outcome:
        """Run one request as the gateway does. If `aggregated`, the decode worker computes the prompt."""
        work = self.work(f"r{random.getrandbits(64)}", prompt, max_tokens, **sampling)
        if adapter is not None:
            work.adapter.CopyFrom(adapter_to_pb(adapter))
            work.model = work_model(self.model, has_adapter=True)
        work.tails.extend(tails)
        work.kept_tokens = kept
        outcome = Outcome([], 0, [])
        call = self.decode_call()
        try:
            await call.write(worker_pb2.DecodeCommand(admit=work))
            admitted = (await call.read()).admitted
            outcome.cached_tokens, outcome.admitted = admitted.cached_tokens, admitted
            work.key.CopyFrom(admitted.key)
            if aggregated:
                await call.write(worker_pb2.DecodeCommand(prefill_here=worker_pb2.PrefillHere()))
            else:
                finished = await self._prefill(work, outcome, call)
                if finished:
                    return outcome
            while not (event := outcome.note(await call.read())).HasField("finished"):
                outcome.tokens += [token.id for token in event.tokens.tokens]
                outcome.scores += event.prompt_logprobs.tokens
                if cancel_after is not None and len(outcome.tokens) >= cancel_after:
                    break
            return outcome
        finally:
            call.cancel()

    async def _prefill(self, work: common_pb2.Work, outcome: Outcome, decode: DecodeCall) -> bool:
        request = worker_pb2.PrefillRequest(work=work, host_id="host")
        call = self.prefill_stub.Run(request, timeout=60)
        while not (event := outcome.note(await call.read())).HasField("first_token"):
            outcome.scores += event.prompt_logprobs.tokens
            outcome.alive += event.HasField("alive")
        first = event.first_token
        outcome.tokens.append(first.token.id)
        if first.finish_reason != common_pb2.FINISH_REASON_NONE:
            return True
        handoff = worker_pb2.Handoff(key=(await call.read()).filled.key, first_token_id=first.token.id)
        await decode.write(worker_pb2.DecodeCommand(handoff=handoff))
        return False

    async def ledger(self) -> kvtransfer_pb2.LedgerReply:
        return await self.kv_stub.Ledger(kvtransfer_pb2.LedgerRequest(with_leases=True), timeout=5)

    async def all_blocks_back(self) -> bool:
        """Wait until no block is leased or in flight. Return False after PATIENCE seconds. The ledger must always
        balance.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while True:
                    ledger = await self.ledger()
                    assert ledger.balanced
                    if ledger.held == ledger.in_flight == 0:
                        return True
                    await asyncio.sleep(0.02)
        return False


def prompts(count: int, shortest: int = 3, longest: int = 200) -> list[list[int]]:
    """Return prompts of random lengths and tokens. The same arguments give the same prompts."""
    rng = random.Random(5)
    return [[rng.randrange(3, PROMPT_VOCABULARY) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


StartHost = Callable[..., contextlib.AbstractAsyncContextManager[Host]]


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Restore the number of torch threads. Workers set it for their process, which is also that of the other tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def start_host(redis_server: str, tmp_path: Path) -> StartHost:
    """Return a function that starts a host for the model in a folder."""

    @contextlib.asynccontextmanager
    async def start(folder: Path, kv_memory: int = 4 << 20, **options: Any) -> AsyncIterator[Host]:
        clock = Clock()
        service = KVTransferService(HostOptions("host", kv_memory, tmp_path, 3, Credentials(), clock=clock))
        server = RpcServer("127.0.0.1", 0, Credentials())
        kvtransfer_pb2_grpc.add_KVTransferServicer_to_server(service, server.server)
        await service.start()
        address = f"127.0.0.1:{await server.start()}"
        places = {"redis": redis_server, "cluster": "workers", "kvtransfer_address": address}
        sizes = {"max_seqs": min(64, options.get("max_batched_tokens", 64)), "threads": 1}
        config = WorkerConfig(**{"model": str(folder), **sizes, **places, **options})
        prefill = await WorkerProcess.start(config, "prefill", make_worker, add_services)
        decode = await WorkerProcess.start(config, "decode", make_worker, add_services)
        host = Host(prefill, decode, address, service, clock)
        try:
            yield host
            async with asyncio.timeout(PATIENCE):  # a handler may still be ending
                while prefill.worker.requests or decode.worker.requests:
                    await asyncio.sleep(0.01)
        finally:
            for channel in host.channels:
                await channel.close()
            await decode.close()
            await prefill.close()
            await service.close()
            await server.close(0)

    return start


@pytest.fixture
def start_llama(start_host: StartHost, save_llama: SaveTiny, tmp_path: Path) -> StartHost:
    """Return a function that starts a host for a tiny Llama."""
    save_llama()
    return functools.partial(start_host, tmp_path)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[UnreliableHost]:
    """A host with two workers, whose kvtransfer loses messages when the test says so."""
    async with start_unreliable_host(tmp_path) as running:
        yield running
