"""Measure the gateway alone, with a worker that computes nothing: tokens streamed per second of its CPU time.

    python -m bench.gateway.alone ~/.cache/paceline/smollm2-135m-instruct --streams 8 --streams 64 --json gateway.json

The worker speaks the protocol of decode workers. In each step it sends one token of every stream, all in one message.
With --step-seconds 0 the next step follows at once. The client reads every stream to its end, and a stream with too few
tokens is an error. Only CPU time of the gateway's own process counts.

With --parsers it also measures chats: without a parser, and with parsers of reasoning and tool calls whose answers are
content, reasoning, or the arguments of a call. All ways take turns in rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import psutil

from bench.common.workloads import Request, Workload
from bench.serving.load import Server, percentile, table
from paceline.core.model_folder import model_digest
from paceline.core.types import Token
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.services.common.credentials import Credentials
from paceline.services.common.member_signatures import UNSIGNED
from paceline.services.common.registry import Member, Registrar
from paceline.services.common.rpc import RpcServer
from paceline.services.common.unix_socket import UnixListener
from paceline.services.decode.outbox import EventConnection, Outbox, Outboxes
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.serve.redis_server import redis_command, wait_for_redis

FIRST_ID, IDS = 1000, 20_000
"""First id and number of the token ids that are sent in turn: common words."""
START_SECONDS = 30.0

_CALL_SEED = 1
"""Seed of requests whose answers are the arguments of a tool call."""
_CALL = '<tool_call>\n{"name": "find", "arguments": {"text": "'
_ASKED = [{"role": "user", "content": "Find it."}]
_TOOL = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"text": {"type": "string"}}}}}
_THINKING = [*_ASKED, {"role": "assistant", "content": "<think>\n"}]
_PARSERS = ("--tool-call-parser=hermes", "--reasoning-parser=think")


class Way(NamedTuple):
    """One kind of request."""

    chat: dict[str, Any] | None = None
    """Fields of a chat; None for a completion."""
    is_parsed: bool = False
    """Whether the gateway parses reasoning and tool calls."""


WAYS = {
    "completions": Way(),
    "chats": Way({"messages": _ASKED}),
    "parsed content": Way({"messages": _ASKED, "tools": [_TOOL]}, True),
    "parsed reasoning": Way({"messages": _THINKING, "tools": [_TOOL], "continue_final_message": True}, True),
    "parsed arguments": Way({"messages": _ASKED, "tools": [_TOOL], "seed": _CALL_SEED}, True),
}

Figures = dict[str, dict[int, dict[str, float]]]
"""Figures by way and by number of streams."""

Context = grpc.aio.ServicerContext[worker_pb2.DecodeCommand, worker_pb2.DecodeEvent]


class Gateway(NamedTuple):
    url: str
    process: psutil.Process


class Gateways(NamedTuple):
    plain: Gateway
    """The gateway without parsers."""
    parsing: Gateway


class Reciter(worker_pb2_grpc.DecodeServicer):
    """A decode worker that computes nothing and sends token ids in order.

    Args:
        call: token ids of the beginning of a tool call, which come first if the seed is _CALL_SEED.
    """

    def __init__(self, step_seconds: float, call: Sequence[int]) -> None:
        self._step_seconds = step_seconds
        self._call = call
        self._step = asyncio.Event()
        self.outboxes = Outboxes()

    async def steps(self) -> None:
        """Begin a step for all streams every `step_seconds`, until cancelled."""
        while True:
            await asyncio.sleep(self._step_seconds)
            step, self._step = self._step, asyncio.Event()
            step.set()

    async def _admit(
        self, commands: AsyncIterator[worker_pb2.DecodeCommand], context: Context
    ) -> tuple[worker_pb2.Work, int, Outbox]:
        """Admit a request, and wait for its handoff. Return its work, the number of the attempt and its outbox."""
        command = await anext(commands)
        await context.write(worker_pb2.DecodeEvent(admitted=worker_pb2.Admitted(key=command.admit.key)))
        await anext(commands)
        return command.admit, command.recipient.attempt, self.outboxes.of(command.recipient)

    async def Generate(  # type: ignore[override]
        self, commands: AsyncIterator[worker_pb2.DecodeCommand], context: Context
    ) -> None:
        work, number, outbox = await self._admit(commands, context)
        opening = self._call if work.sampling.seed == _CALL_SEED else ()
        token_ids = itertools.chain(opening, (FIRST_ID + index % IDS for index in itertools.count()))
        for token_id in itertools.islice(token_ids, work.sampling.max_tokens):
            await self._step.wait()
            outbox.token(number, Token(token_id))
            await outbox.flush()
        outbox.event(number).finished.reason = common_pb2.FINISH_REASON_LENGTH
        await outbox.flush()


@contextlib.asynccontextmanager
async def stack(model: Path, step_seconds: float, worker: Reciter | None = None) -> AsyncIterator[Gateways]:
    """Run two gateways with `worker` as their worker; by default a Reciter."""
    async with contextlib.AsyncExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        redis = f"unix://{folder / 'redis.sock'}"
        await _start(undo, *redis_command(folder / "redis.sock"))
        await wait_for_redis(redis, START_SECONDS)
        reciter = worker or Reciter(step_seconds, Tokenizer(model).encode(_CALL, False))
        rpc = RpcServer("127.0.0.1", 0, Credentials(), "reciter")
        worker_pb2_grpc.add_DecodeServicer_to_server(reciter, rpc.server)
        port = await rpc.start()
        undo.push_async_callback(rpc.close, 0)
        await rpc.set_ready(True)
        listener = UnixListener(folder, lambda: EventConnection(reciter.outboxes))
        await listener.start()
        undo.push_async_callback(listener.close)
        facts = {"max_model_len": 8192, "max_seqs": 1024, "events": str(listener.path), "model": model_digest(model)}
        member = Member("reciter", "decode", 1, f"127.0.0.1:{port}", "h", **facts)
        registrar = Registrar(redis, "bench", lambda: member, UNSIGNED)
        await registrar.start()
        undo.push_async_callback(registrar.stop)
        steps = asyncio.create_task(reciter.steps())
        undo.callback(steps.cancel)
        options = (str(model), f"--redis={redis}", "--cluster=bench")
        plain = await _start_gateway(undo, *options, "--tool-call-parser=none", "--reasoning-parser=none")
        parsing = await _start_gateway(undo, *options, *_PARSERS)
        await asyncio.sleep(1.0)  # until the gateways have seen the worker
        yield Gateways(plain, parsing)


async def _start_gateway(undo: contextlib.AsyncExitStack, *options: str) -> Gateway:
    readable, writable = os.pipe()
    flags = ("--port=0", f"--ready-fd={writable}", "--log-level=warning")
    process = await _start(undo, sys.executable, "-m", "paceline", "gateway", *options, *flags, keep=writable)
    os.close(writable)
    address = (await asyncio.to_thread(os.read, readable, 100)).decode().strip()
    os.close(readable)
    if not address:
        raise RuntimeError("the gateway did not start")
    return Gateway(f"http://{address}", psutil.Process(process.pid))


async def _start(undo: contextlib.AsyncExitStack, *command: str, keep: int = -1) -> asyncio.subprocess.Process:
    pass_fds = [keep] if keep >= 0 else []
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, pass_fds=pass_fds)

    async def stop() -> None:
        process.terminate()
        await process.wait()

    undo.push_async_callback(stop)
    return process


async def measure(gateways: Gateways, streams: int, tokens: int, way: str = "completions") -> dict[str, float]:
    """Run one round of `streams` simultaneous streams of `tokens` tokens each, and return its figures."""
    chat, is_parsed = WAYS[way]
    gateway = gateways.parsing if is_parsed else gateways.plain
    requests = tuple(Request((FIRST_ID, FIRST_ID + 1), tokens, chat=chat) for _ in range(streams))
    async with Server(gateway.url) as server:
        await server.run(Workload("warm-up", requests[:1], 1))
        before, began = cpu_seconds(gateway.process), time.perf_counter()
        outcomes = await server.run(Workload("streams", requests, streams))
        used, seconds = cpu_seconds(gateway.process) - before, time.perf_counter() - began
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise RuntimeError(f"{len(failed)} streams failed; the first: {failed[0]}")
    gaps = [later - earlier for outcome in outcomes for earlier, later in zip(outcome.chunks, outcome.chunks[1:])]
    return {
        "tokens_per_cpu_s": streams * tokens / used,
        "cpu_us_per_token": 1e6 * used / (streams * tokens),
        "tokens_per_s": streams * tokens / seconds,
        "chunks_per_token": sum(len(outcome.chunks) for outcome in outcomes) / (streams * tokens),
        "itl_ms_p99": 1000 * percentile(gaps, 99),
    }


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time that a process has used."""
    times = process.cpu_times()
    return times.user + times.system


async def run(options: argparse.Namespace) -> Figures:
    ways = WAYS if options.parsers else ("completions",)
    counts = options.streams or (8, 64)
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in itertools.product(ways, counts)}
    async with stack(options.model, options.step_seconds) as gateways:
        for _ in range(options.rounds):
            for (way, streams), figures in rounds.items():
                figures.append(await measure(gateways, streams, options.tokens, way))
    medians = {
        key: {name: statistics.median(one[name] for one in figures) for name in figures[0]}
        for key, figures in rounds.items()
    }
    return {way: {streams: medians[way, streams] for streams in counts} for way in ways}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.alone", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="Hugging Face folder; only its tokenizer is read")
    parser.add_argument("--streams", type=int, action="append", help="simultaneous streams; may be repeated")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a stream [%(default)s]")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pause between two tokens [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the measurement [%(default)s]")
    parser.add_argument("--parsers", action="store_true", help="also measure chats without and with parsers")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    figures = asyncio.run(run(options))
    rows = [(way, streams, row) for way, way_figures in figures.items() for streams, row in way_figures.items()]
    columns = list(rows[0][2])
    cells = [[way, str(streams), *(f"{row[column]:.1f}" for column in columns)] for way, streams, row in rows]
    print(table(["way", "streams", *columns], cells))
    if options.json:
        options.json.write_text(json.dumps({"step_seconds": options.step_seconds, "ways": figures}, indent=2))


if __name__ == "__main__":
    main()
