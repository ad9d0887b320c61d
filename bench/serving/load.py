"""Load any OpenAI-compatible server with requests and measure what a client sees.

    python -m bench.serving.load --url http://127.0.0.1:8000 --workload one --workload interference --out load.json

TTFT is the time from sending a request to its first token. ITL is the gap between two chunks of a stream. TPOT is the
mean time of a token after the first. Chunks get their timestamps on arrival and are parsed after the last stream.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.common.systems import ServerError
from bench.common.workloads import WORKLOADS, Request, Workload, make_workload

STALL_SECONDS = 300.0
"""A stream fails if nothing arrives for this long."""
REQUEST_SECONDS = 1800.0
"""A stream fails if it has not ended after this time."""


Round = dict[str, dict[str, dict[str, float]]]
"""Figures by workload, group and name of the figure."""


@dataclass(slots=True)
class Stream:
    """One request and the pieces of its response with their arrival times, in seconds of time.perf_counter()."""

    request: Request
    sent: float = 0.0
    ended: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one stream, parsed."""

    group: str
    sent: float
    ended: float
    chunks: tuple[float, ...] = ()
    """Arrival time of each chunk that has output."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""


class Server:
    """A server under load."""

    def __init__(self, url: str, model: str = "", api_key: str = "") -> None:
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers=headers,
            timeout=httpx.Timeout(STALL_SECONDS, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        self.model = model

    async def __aenter__(self) -> Server:
        try:
            reply = await self._client.get("/v1/models")
            reply.raise_for_status()
            self.model = self.model or reply.json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            await self._client.aclose()
            raise ServerError(
                f"{self._client.base_url} does not answer as an OpenAI-compatible server: {error!r}"
            ) from error
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.aclose()

    async def metrics(self) -> str:
        """Return the text of /metrics. Raises ServerError."""
        try:
            return (await self._client.get("/metrics")).raise_for_status().text
        except httpx.HTTPError as error:
            raise ServerError(f"{self._client.base_url} shows no metrics: {error!r}") from error

    async def run(self, workload: Workload) -> list[Outcome]:
        """Send all requests of the workload, each when its time `at` has come, the earlier requests of its stream have
        ended, and the concurrency limit allows it."""
        places = asyncio.Semaphore(workload.concurrency)
        streams: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # a lock is fair
        start = time.perf_counter()

        async def one(request: Request) -> Stream:
            await asyncio.sleep(max(0.0, start + request.at - time.perf_counter()))
            async with streams[request.stream] if request.stream else contextlib.nullcontext(), places:
                return await self._stream(request)

        sent = await asyncio.gather(*(one(request) for request in workload.requests))
        return [understand(stream) for stream in sent]

    async def _stream(self, request: Request) -> Stream:
        stream = Stream(request)
        path = "/v1/completions" if request.chat is None else "/v1/chat/completions"
        body = {
            "model": self.model,
            **({"prompt": request.prompt} if request.chat is None else request.chat),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        stream.sent = time.perf_counter()
        try:
            async with (
                asyncio.timeout(REQUEST_SECONDS),
                self._client.stream("POST", path, json=body) as reply,
            ):
                async for piece in reply.aiter_raw():
                    stream.pieces.append((time.perf_counter(), piece))
            if reply.status_code != 200:
                text = b"".join(piece for _, piece in stream.pieces).decode(errors="replace")
                stream.error = f"status {reply.status_code}: {text[:200]}"
        except (httpx.HTTPError, TimeoutError) as error:
            stream.error = repr(error)
        stream.ended = time.perf_counter()
        return stream


def understand(stream: Stream) -> Outcome:
    """Parse the server-sent events of a stream. A stream that is cut short or has too few tokens gets an error."""
    request, error, done = stream.request, stream.error, False
    usage: dict[str, int] = {}
    chunks: list[float] = []
    for moment, data in [] if error else events_of(stream.pieces):
        if data == b"[DONE]":
            done = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            event = {"error": f"not JSON: {data[:100]!r}"}
        error = error or str(event.get("error") or "")
        usage = event.get("usage") or usage
        # A last chunk may have only a finish reason, without output.
        if any(choice.get("text") or not choice.get("finish_reason") for choice in event.get("choices", ())):
            chunks.append(moment)
    tokens = usage.get("completion_tokens", 0)
    if not error and not done:
        error = "the stream ended without [DONE]"
    if not error and (tokens != request.max_tokens or not chunks):
        error = f"{tokens} tokens in {len(chunks)} chunks instead of {request.max_tokens} tokens"
    return Outcome(
        request.group, stream.sent, stream.ended, tuple(chunks), usage.get("prompt_tokens", 0), tokens, error
    )


def events_of(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the data of each server-sent event with the arrival time of its last byte."""
    rest = b""
    for moment, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield moment, line.removeprefix(b"data:").strip()


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, linear between the two nearest values; NaN if there are no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Return figures by group: milliseconds, tokens per second, counts. Failed requests count only as failures."""
    return {
        group: _summarize_group([outcome for outcome in outcomes if outcome.group == group])
        for group in dict.fromkeys(outcome.group for outcome in outcomes)
    }


def _summarize_group(outcomes: Sequence[Outcome]) -> dict[str, float]:
    good = [outcome for outcome in outcomes if not outcome.error]
    figures = {"requests": float(len(outcomes)), "failures": float(len(outcomes) - len(good))}
    samples = {
        "ttft_ms": [outcome.chunks[0] - outcome.sent for outcome in good],
        "tpot_ms": [
            (outcome.chunks[-1] - outcome.chunks[0]) / (outcome.completion_tokens - 1)
            for outcome in good
            if outcome.completion_tokens > 1
        ],
        "itl_ms": [later - earlier for outcome in good for earlier, later in zip(outcome.chunks, outcome.chunks[1:])],
    }
    for name, values in samples.items():
        for percent in (50, 90, 99):
            figures[f"{name}_p{percent}"] = 1000 * percentile(values, percent)
    seconds = max(o.ended for o in outcomes) - min(o.sent for o in outcomes)
    figures["seconds"] = seconds
    figures["output_tokens_per_s"] = sum(o.completion_tokens for o in good) / seconds
    figures["total_tokens_per_s"] = sum(o.completion_tokens + o.prompt_tokens for o in good) / seconds
    return figures


def new_file(text: str) -> Path:
    """Parse an option that names an output file, so that a path that cannot be written fails before the measurement."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(path.parent)!r}")
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines)


async def wake(server: Server, seed: int, vocab: int) -> None:
    """Send one warm-up request. Its prompt differs from those of all workloads with this seed."""
    await server.run(Workload("warm-up", make_workload("one", seed + 1, vocab).requests[:1], concurrency=1))


async def load(server: Server, names: Sequence[str], seed: int, vocab: int) -> Round:
    """Run workloads one after the other, after one warm-up request, and return their figures."""
    await wake(server, seed, vocab)
    figures = {}
    for name in names:
        outcomes = await server.run(make_workload(name, seed, vocab))
        for error in sorted({outcome.error for outcome in outcomes if outcome.error}):
            print(f"{name}: {error}", file=sys.stderr)
        figures[name] = summarize(outcomes)
    return figures


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all benchmarks that send workloads."""
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="may be repeated; default: all")
    parser.add_argument("--vocab", type=int, default=32_000, help="prompts have token ids below this")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="seed of prompts; default: a new one")
    parser.add_argument("--api-key", default="", help="API key for the server")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.load", description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server to load")
    parser.add_argument("--model", default="", help="model name; default: the first one that the server lists")
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    add_options(parser)
    args = parser.parse_args()

    async def run() -> Round:
        async with Server(args.url, args.model, args.api_key) as server:
            return await load(server, args.workload or list(WORKLOADS), args.seed, args.vocab)

    try:
        figures = asyncio.run(run())
    except ServerError as error:
        print(f"bench.serving.load: {error}", file=sys.stderr)
        return 1
    groups = [(name, group, row) for name, groups in figures.items() for group, row in groups.items()]
    columns = list(groups[0][2])
    print(table(["workload", "group", *columns], [[n, g, *(f"{row[c]:.1f}" for c in columns)] for n, g, row in groups]))
    if args.out:
        args.out.write_text(json.dumps({"url": args.url, "seed": args.seed, "figures": figures}, indent=2) + "\n")
    return 1 if any(row["failures"] for _, _, row in groups) else 0


if __name__ == "__main__":
    raise SystemExit(main())
