"""Time of a message over three processes, as in a handoff: from a sender through a middle process to a receiver.

    python -m bench.transfer.messages --messages 200

It compares three ways to connect a worker and the kvtransfer service of its host: gRPC calls, gRPC streams that stay
open, and the Unix socket. Each message names all blocks of a prompt of 2,000 tokens, which is more than a handoff's
messages do. There is a pause before each message, so that all processes are asleep when it comes. The processes do no
other work; `bench.transfer.handoff` measures the handoff of a real stack.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from bench.serving.load import table
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import RpcServer, open_channel
from paceline.services.kvtransfer.host_socket import HostSocket
from paceline.services.worker.batch_sender import HostConnection

WAYS = ("calls", "streams", "socket")
BLOCKS = 125
PUT, GET = 1, 2
"""Session numbers of the sender and of the receiver."""
PAUSE_SECONDS = 0.02

Ask = Callable[[pb.BatchRequest], Awaitable[pb.BatchReply]]

_HASHES = [os.urandom(16) for _ in range(BLOCKS)]
_SERVER: dict[str, Any] = {
    "request_deserializer": pb.BatchRequest.FromString,
    "response_serializer": pb.BatchReply.SerializeToString,
}
_CLIENT: dict[str, Any] = {
    "request_serializer": pb.BatchRequest.SerializeToString,
    "response_deserializer": pb.BatchReply.FromString,
}


class Middle:
    """The process between sender and receiver. It gives each message of the sender to the waiting receiver."""

    def __init__(self) -> None:
        self._receiver: Callable[[pb.BatchReply], None] | None = None
        self._instant = ""

    def serve(self, request: pb.BatchRequest, reply: Callable[[pb.BatchReply], None]) -> None:
        if request.session == GET:
            self._receiver = reply
        else:
            self._instant = request.operations[0].traceparent
        if self._receiver is not None and self._instant:
            lease = pb.Lease(tables=[pb.BlockTable(slots=range(BLOCKS), hashes=_HASHES)])
            self._receiver(pb.BatchReply(results=[pb.Result(message=self._instant, lease=lease)]))
            self._receiver, self._instant = None, ""
        if request.session == PUT:
            reply(pb.BatchReply())

    async def call(self, request: pb.BatchRequest, context: object) -> pb.BatchReply:
        answer: asyncio.Future[pb.BatchReply] = asyncio.get_running_loop().create_future()
        self.serve(request, answer.set_result)
        return await answer

    async def stream(self, requests: AsyncIterator[pb.BatchRequest], context: Any) -> None:
        async for request in requests:
            await context.write(await self.call(request, context))


async def be_middle(folder: Path) -> None:
    """Serve all ways until killed. Print the gRPC port and the path of the Unix socket first."""
    middle, server = Middle(), RpcServer("127.0.0.1", 0, Credentials())
    methods = {
        "call": grpc.unary_unary_rpc_method_handler(middle.call, **_SERVER),
        "stream": grpc.stream_stream_rpc_method_handler(middle.stream, **_SERVER),
    }
    server.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("messages", methods)])
    host_socket = HostSocket(folder, middle.serve)
    await host_socket.start()
    print(await server.start(), host_socket.path, flush=True)
    await asyncio.Event().wait()


async def connect(way: str, port: str, path: str) -> Ask:
    if way == "socket":
        return (await HostConnection.connect(path)).call
    channel = open_channel(f"127.0.0.1:{port}", Credentials())
    if way == "calls":
        return channel.unary_unary("/messages/call", **_CLIENT)
    stream: Any = channel.stream_stream("/messages/stream", **_CLIENT)()

    async def ask(request: pb.BatchRequest) -> pb.BatchReply:
        await stream.write(request)
        return await stream.read()  # type: ignore[no-any-return]

    return ask


async def be_receiver(way: str, port: str, path: str) -> None:
    """Print the microseconds that each message took."""
    ask = await connect(way, port, path)
    print("ready", flush=True)
    while True:
        (result,) = (await ask(pb.BatchRequest(session=GET))).results
        print((time.perf_counter_ns() - int(result.message)) / 1000, flush=True)


async def be_sender(way: str, port: str, path: str, messages: int) -> None:
    ask = await connect(way, port, path)
    for _ in range(messages):
        await asyncio.sleep(PAUSE_SECONDS)
        seal = pb.Operation(seal=pb.Seal(hashes=_HASHES), traceparent=str(time.perf_counter_ns()))
        await ask(pb.BatchRequest(session=PUT, operations=[seal]))


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.transfer.messages", *arguments], stdout=subprocess.PIPE, text=True
    )


def measure(folder: str, messages: int, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of each message, by way. The ways take turns. A round's first quarter is left out."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with start("--middle", folder) as middle:
        assert middle.stdout is not None
        port, path = middle.stdout.readline().split()
        for _ in range(rounds):
            for way in WAYS:
                with start("--receiver", way, port, path) as receiver:
                    assert receiver.stdout is not None
                    receiver.stdout.readline()
                    asyncio.run(be_sender(way, port, path, messages))
                    found[way] += [float(receiver.stdout.readline()) for _ in range(messages)][messages // 4 :]
                    receiver.kill()
        middle.kill()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer.messages", description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=200, help="messages in a round; the first quarter is skipped")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the measurement [%(default)s]")
    parser.add_argument("--middle", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--receiver", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.middle:
        asyncio.run(be_middle(Path(options.middle)))
    elif options.receiver:
        asyncio.run(be_receiver(*options.receiver))
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(folder, options.messages, options.rounds)
        rows = [
            [way, f"{statistics.median(each):.0f}", f"{statistics.quantiles(each, n=10)[-1]:.0f}"]
            for way, each in found.items()
        ]
        print(table(["way", "median, µs", "90 % below, µs"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
