"""Measure one gateway with many open streams: the latency that it adds, its memory for each, and the console's cost.

    python -m bench.gateway.streams ~/.cache/paceline/smollm2-135m-instruct --streams 1000 --json /tmp/streams.json

The worker computes nothing and stands for `--workers` decode workers: each has its part of the streams, and in each of
its steps sends one token of each. Steps of different workers are spread evenly over time. The clients run in a process
of their own. The added latency of a token is the time from the worker's step, before its message is sent, until the
client has read it. So it includes the worker's sending and the client's reading. Memory is the growth of the gateway's
resident set while all streams are open. The console's cost is the gateway's CPU time with some open consoles, which
read the same stream of events as the page, minus its CPU time without any. No request runs meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from bench.gateway.alone import FIRST_ID, IDS, Context, Gateway, Reciter, cpu_seconds, stack
from bench.serving.load import percentile
from paceline.core.types import Token
from paceline.proto import common_pb2, worker_pb2
from paceline.services.decode.outbox import Outbox

Arrivals = dict[str, list[tuple[float, int]]]
"""For each stream, by the id of its request: the times of its chunks, on time.monotonic(), and their numbers of tokens.
"""

WARM_UP_TOKENS = 8
"""First tokens of each stream that do not count, because streams open one after another."""


class Chorus(Reciter):
    """Several workers in one. All streams of a worker get a token in each step. It notes the time of each token."""

    def __init__(self, step_seconds: float, workers: int) -> None:
        super().__init__(step_seconds, ())
        self._workers = workers
        self.sent: dict[str, list[float]] = {}
        """For each request, the times at which its tokens were sent, on time.monotonic()."""
        self._voices: dict[int, tuple[Outbox, str, int]] = {}
        self._over: dict[int, asyncio.Event] = {}

    async def steps(self) -> None:
        began = time.monotonic()
        for step in itertools.count(1):
            await asyncio.sleep(began + step * self._step_seconds / self._workers - time.monotonic())
            now = time.monotonic()
            voices = [voice for voice in self._voices.items() if voice[0] % self._workers == step % self._workers]
            for number, (outbox, request_id, tokens) in voices:
                sent = self.sent[request_id]
                outbox.token(number, Token(FIRST_ID + len(sent) % IDS))
                sent.append(now)
                if len(sent) == tokens:
                    outbox.event(number).finished.reason = common_pb2.FINISH_REASON_LENGTH
                    del self._voices[number]
                    self._over.pop(number).set()

    async def Generate(  # type: ignore[override]
        self, commands: AsyncIterator[worker_pb2.DecodeCommand], context: Context
    ) -> None:
        work, number, outbox = await self._admit(commands, context)
        # The gateway adds twelve digits to an id that a client chose.
        request_id = work.key.request_id.rpartition("-")[0]
        self.sent[request_id] = []
        over = self._over[number] = asyncio.Event()
        self._voices[number] = outbox, request_id, work.sampling.max_tokens
        await over.wait()
        await outbox.flush()


async def read_stream(url: str, request_id: str, tokens: int) -> list[tuple[float, int]]:
    """Open one stream and return the times of its chunks and their numbers of tokens. Raises RuntimeError if tokens are
    missing.
    """
    where = urlsplit(url)
    asked = {"prompt": [FIRST_ID], "max_tokens": tokens, "stream": True, "return_token_ids": True, "ignore_eos": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\nX-Request-Id: {request_id}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    arrivals: list[tuple[float, bytes]] = []
    try:
        writer.write(head.encode() + body)
        while not (line := await reader.readline()).startswith(b"data: [DONE]"):
            if not line:
                raise RuntimeError(f"the stream {request_id} ended early")
            if line.startswith(b"data: "):
                arrivals.append((time.monotonic(), line))
    finally:
        writer.close()
    counts = [len(json.loads(line[6:])["choices"][0].get("token_ids") or ()) for _, line in arrivals]
    if sum(counts) != tokens:
        raise RuntimeError(f"the stream {request_id} had {sum(counts)} tokens, not {tokens}")
    return [(at, count) for (at, _), count in zip(arrivals, counts) if count]


def run_clients(pipe: Connection, url: str, streams: int, tokens: int) -> None:
    """Run all streams in this process and send their arrivals, or the error, through the pipe."""

    async def run() -> Arrivals:
        async def later(number: int) -> list[tuple[float, int]]:
            await asyncio.sleep(number / 500)  # no burst of new connections, which is another figure
            return await read_stream(url, f"stream{number}", tokens)

        read = await asyncio.gather(*(later(number) for number in range(streams)))
        return {f"stream{number}": arrivals for number, arrivals in enumerate(read)}

    try:
        pipe.send(asyncio.run(run()))
    except Exception as error:
        pipe.send(error)


def latencies(sent: dict[str, list[float]], arrivals: Arrivals) -> Iterator[float]:
    """Yield the added latency of each token, in seconds, while all streams are open."""
    opened = max(times[WARM_UP_TOKENS] for times in sent.values())
    closed = min(times[-1] for times in sent.values())
    for request_id, chunks in arrivals.items():
        came = [at for at, count in chunks for _ in range(count)]
        for begun, ended in zip(sent[request_id], came, strict=True):
            if opened <= begun <= closed:
                yield ended - begun


async def measure_streams(gateway: Gateway, chorus: Chorus, streams: int, tokens: int) -> dict[str, float]:
    """Open all streams, and return the figures of the time in which all are open."""
    chorus.sent.clear()
    ours, theirs = multiprocessing.Pipe()
    clients = multiprocessing.get_context("spawn").Process(
        target=run_clients, args=(theirs, gateway.url, streams, tokens)
    )
    before = gateway.process.memory_info().rss
    clients.start()
    try:
        while sum(len(times) > WARM_UP_TOKENS for times in chorus.sent.values()) < streams:
            await asyncio.sleep(0.1)
            if not clients.is_alive():
                break
        began, used = time.monotonic(), cpu_seconds(gateway.process)
        await asyncio.sleep(1)
        memory = gateway.process.memory_info().rss - before
        share = (cpu_seconds(gateway.process) - used) / (time.monotonic() - began)
        arrivals = await asyncio.to_thread(ours.recv)
    finally:
        await asyncio.to_thread(clients.join)
    if isinstance(arrivals, Exception):
        raise arrivals
    added = sorted(1000 * each for each in latencies(chorus.sent, arrivals))
    return {
        "tokens": len(added),
        "added_ms_p50": percentile(added, 50),
        "added_ms_p99": percentile(added, 99),
        "added_ms_max": added[-1],
        "kib_per_stream": memory / streams / 1024,
        "gateway_cores": share,
    }


async def measure_consoles(gateway: Gateway, consoles: int, seconds: float) -> float:
    """Return the share of a core that the gateway uses with `consoles` open consoles."""
    async with contextlib.AsyncExitStack() as undo:
        client = await undo.enter_async_context(httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False))
        reading = [asyncio.create_task(_read_console(client)) for _ in range(consoles)]
        undo.callback(lambda: [task.cancel() for task in reading])
        await asyncio.sleep(2)
        began, used = time.monotonic(), cpu_seconds(gateway.process)
        await asyncio.sleep(seconds)
        for task in reading:
            if task.done():
                task.result()
        return (cpu_seconds(gateway.process) - used) / (time.monotonic() - began)


async def _read_console(client: httpx.AsyncClient) -> None:
    for name in ("", "console/app.js", "console/uplot.iife.min.js"):
        (await client.get(f"/{name}")).raise_for_status()
    async with client.stream("GET", "/console/feed") as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_raw():
            pass


async def run(options: argparse.Namespace) -> dict[str, float]:
    chorus = Chorus(options.step_seconds, options.workers)
    async with stack(options.model, options.step_seconds, chorus) as gateways:
        gateway = gateways.plain
        figures = await measure_streams(gateway, chorus, options.streams, options.tokens)
        shares: dict[int, list[float]] = {0: [], options.consoles: []}
        for _ in range(options.rounds):
            for consoles, console_shares in shares.items():
                console_shares.append(await measure_consoles(gateway, consoles, options.seconds))
    without, with_consoles = (statistics.median(console_shares) for console_shares in shares.values())
    return {**figures, "idle_core_percent": 100 * without, "consoles_core_percent": 100 * (with_consoles - without)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway.streams", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="Hugging Face folder; only its tokenizer is read")
    parser.add_argument("--streams", type=int, default=1000, help="open streams [%(default)s]")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a stream [%(default)s]")
    parser.add_argument("--step-seconds", type=float, default=0.2, help="pause between two tokens [%(default)s]")
    parser.add_argument("--workers", type=int, default=16, help="decode workers that have the streams [%(default)s]")
    parser.add_argument("--consoles", type=int, default=3, help="open consoles [%(default)s]")
    parser.add_argument("--seconds", type=float, default=30.0, help="time of each look at the CPU [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="turns without and with consoles [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    figures = asyncio.run(run(options))
    for name, value in figures.items():
        print(f"{name:24} {value:12.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
