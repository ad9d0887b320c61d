"""Two hosts for transfers of prompts: one has a prefill worker, the other a decode worker."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paceline.core.errors import UnavailableError
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto.common_pb2 import Key
from paceline.services.common.shared_memory import map_arena
from paceline.services.kvtransfer.transports.transport import ArenaMemory, Source
from tests.services.kvtransfer.kv_host import SLOT, Host, Worker, key, release, reserve
from tests.services.kvtransfer.kv_toolkit import chain

CONTEXT = "abcdef"
TOKENS = 16 * len(CONTEXT) + 5
"""Six full blocks and a part of one."""
SLOTS = 40


class Blocks:
    """A worker's mapping of the arena of its host."""

    def __init__(self, worker: Worker) -> None:
        arena = worker.arena
        self._memory = map_arena(Path(arena.arena_path), arena.arena_bytes)

    def write(self, slot: int, content: bytes) -> None:
        self._memory[slot * SLOT : (slot + 1) * SLOT] = content

    def read(self, slot: int) -> bytes:
        return bytes(self._memory[slot * SLOT : (slot + 1) * SLOT])


class Pair:
    """A source host with a prefill worker, and a destination host with a decode worker."""

    def __init__(self, source: Host, destination: Host, prefill: Worker, decode: Worker) -> None:
        self.source, self.destination = source, destination
        self.prefill, self.decode = prefill, decode
        self.there, self.here = Blocks(prefill), Blocks(decode)
        self.random = random.Random(7)
        self.contents: dict[tuple[int, int], bytes] = {}
        """By group and index in the block table, the bytes that prefill has written."""

    async def begin(self, context: str = CONTEXT, tokens: int = TOKENS) -> tuple[pb.Lease, pb.Lease]:
        """Return the lease that decode has reserved and the lease that prefill has opened."""
        reserved = (await self.decode.do(reserve(key(), context, tokens + 32))).lease
        there = (await self.prefill.do(reserve(key(), context, tokens))).lease
        opened = (await self.prefill.do(pb.Operation(open=pb.Open(key=there.key)))).lease
        return reserved, opened

    def fetch(self, reserved: pb.Lease, opened: pb.Lease) -> grpc.aio.UnaryUnaryCall:
        session = self.decode.arena.session
        request = pb.FetchRequest(session=session, key=reserved.key, source=self.source.address, source_key=opened.key)
        return self.destination.stub.Fetch(request, timeout=30)

    async def compute(self, lease: pb.Lease, first: int, last: int, group: int = 0, context: str = CONTEXT) -> None:
        """Write blocks [first, last) of a group at the source, and seal the full ones."""
        for index in range(first, last):
            content = self.contents[group, index] = self.random.randbytes(SLOT)
            self.there.write(lease.tables[group].slots[index], content)
        if full := chain(context)[first:last]:
            await self.prefill.do(
                pb.Operation(seal=pb.Seal(key=lease.key, group=group, first_block=first, hashes=full))
            )

    async def fill(self, lease: pb.Lease, tokens: int = TOKENS) -> None:
        await self.prefill.do(pb.Operation(fill=pb.Fill(key=lease.key, filled_tokens=tokens)))

    def check(self, lease: pb.Lease, first: int, last: int, group: int = 0) -> None:
        """Check that blocks [first, last) of a group hold the source's bytes at the destination."""
        for index in range(first, last):
            assert self.here.read(lease.tables[group].slots[index]) == self.contents[group, index]

    async def end(self, here: Key | None = None, there: Key | None = None) -> None:
        """Release these leases, and wait until no block of either host is leased or in flight."""
        for worker, of in ((self.decode, here), (self.prefill, there)):
            if of is not None:
                await worker.do(release(of))
        for host in (self.source, self.destination):
            reply = await host.until(lambda reply: not (reply.held or reply.in_flight or reply.leases))
            assert reply.balanced


@contextlib.asynccontextmanager
async def pair(
    folder: Path, shape: pb.KVLayout | None = None, alike: bool = False, **options: object
) -> AsyncIterator[Pair]:
    """Start both hosts. `options` are for the destination's service, or for both services if `alike`."""
    async with contextlib.AsyncExitStack() as undo:
        hosts = []
        for name, own in (("source", options if alike else {}), ("destination", options)):
            (folder / name).mkdir()
            host = Host(folder / name, SLOTS * SLOT, name=name, **own)  # type: ignore[arg-type]
            await host.start()
            undo.push_async_callback(host.close)
            hosts.append(host)
        workers = [await host.attach(shape=shape) for host in hosts]
        yield Pair(hosts[0], hosts[1], workers[0], workers[1])


class Strange:
    """A transport that writes wrong bytes, or raises an error if it is `broken`."""

    def __init__(self, memory: ArenaMemory, name: str, broken: bool = False) -> None:
        self.name = name
        self.reads = 0
        self._memory = memory
        self._broken = broken

    def offer(self) -> bytes:
        return b""

    async def read(self, source: Source, slots: Sequence[tuple[int, int]]) -> None:
        self.reads += 1
        if self._broken:
            raise UnavailableError("it is broken")
        for _, here in slots:
            self._memory.slot(here)[:] = b"?" * SLOT

    async def close(self) -> None:
        pass


def offering(host: Host, *names: str) -> None:
    """Make the source offer only these transports."""
    memory = host.service.sessions.memory
    assert memory is not None
    kept = memory.exports._offer.transports.get("grpc", b"")
    memory.exports._offer.transports.clear()
    for name in names:
        memory.exports._offer.transports[name] = kept if name == "grpc" else b""


async def failure(call: grpc.aio.UnaryUnaryCall) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value
