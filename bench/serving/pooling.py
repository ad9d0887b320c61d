"""Compare two servers of one embedding model in turns: texts per second and latencies, by length and number of clients.

    python -m bench.serving.pooling ours=http://127.0.0.1:8061 theirs=http://127.0.0.1:8062 --model all-minilm-l6-v2 \
        --start ours='paceline serve all-minilm-l6-v2 --port 8061' --start theirs='...'

Each client sends POST /v1/embeddings, with base64, one request after the other.
`bench.serving.sentence_transformers_peer` makes the figures of sentence-transformers without HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import random
import statistics
import time
from collections.abc import Sequence

import aiohttp

from bench.common.systems import ServerError, System
from bench.common.turns import add_options, compare, systems_of
from bench.serving.load import Round

TEXT = "the of and in to was is for on as with by he that at from his it an were are which this be had"
WORDS = TEXT.split()
"""Words that are one token each in the vocabularies of BERT and XLM-R."""
FRAME_TOKENS = 2
"""Number of special tokens around a text."""
TIMEOUT_SECONDS = 120.0


def text_of(tokens: int, rng: random.Random) -> str:
    """Return a random text of this many tokens, special tokens included."""
    return " ".join(rng.choices(WORDS, k=tokens - FRAME_TOKENS))


async def measure(system: System, args: argparse.Namespace, seed: int) -> Round:
    """Return the figures of all lengths and numbers of clients for one server that is up."""
    found: Round = {}
    # httpx takes as much CPU time for a small request as the server.
    connector, timeout = aiohttp.TCPConnector(limit=max(args.clients)), aiohttp.ClientTimeout(TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(system.url, connector=connector, timeout=timeout) as client:
        for tokens in args.tokens:
            for clients in args.clients:
                rng = random.Random(seed * 1000 + tokens)
                await _load(client, args, tokens, clients, 0.2 * args.seconds, rng)  # until caches and threads are warm
                figures = await _load(client, args, tokens, clients, args.seconds, rng)
                found[f"{tokens} tokens, {args.batch} a request"] = {
                    **found.get(f"{tokens} tokens, {args.batch} a request", {}),
                    f"{clients} clients": figures,
                }
    return found


async def _load(
    client: aiohttp.ClientSession,
    args: argparse.Namespace,
    tokens: int,
    clients: int,
    seconds: float,
    rng: random.Random,
) -> dict[str, float]:
    latencies: list[float] = []
    failures = 0
    began = time.perf_counter()
    end = began + seconds

    async def send_requests() -> None:
        nonlocal failures
        while time.perf_counter() < end:
            body = {
                "model": args.model,
                "input": [text_of(tokens, rng) for _ in range(args.batch)],
                "encoding_format": "base64",
            }
            sent = time.perf_counter()
            async with client.post("/v1/embeddings", json=body) as reply:
                answer = await reply.json()
            latencies.append(time.perf_counter() - sent)
            failures += reply.status != 200 or not _is_complete(answer, args.batch)

    await asyncio.gather(*(send_requests() for _ in range(clients)))
    spent = time.perf_counter() - began
    return {
        "texts/s": len(latencies) * args.batch / spent,
        "latency p50 ms": 1000 * statistics.median(latencies),
        "latency p99 ms": 1000 * _quantile(latencies, 0.99),
        "failures": float(failures),
    }


def _is_complete(answer: dict[str, list[dict[str, str]]], count: int) -> bool:
    data = answer["data"]
    return len(data) == count and all(len(base64.b64decode(each["embedding"])) % 4 == 0 for each in data)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.pooling", description=__doc__.partition("\n")[0])
    add_options(parser)
    parser.add_argument("--model", required=True, help="name of the model at both servers")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 256], help="lengths of texts in tokens")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64], help="numbers of clients")
    parser.add_argument("--batch", type=int, default=1, help="texts in a request [%(default)s]")
    parser.add_argument("--seconds", type=float, default=5.0, help="time of each measurement [%(default)g]")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    systems = systems_of(parser, args)
    if min(args.tokens) <= FRAME_TOKENS:
        parser.error(f"--tokens must be more than {FRAME_TOKENS}")

    def turn(system: System, number: int) -> Round:
        try:
            return asyncio.run(measure(system, args, args.seed + number))
        except aiohttp.ClientError as error:
            raise ServerError(f"{system.name}: {type(error).__name__}: {error}") from error

    return compare(parser, args, systems, turn)


if __name__ == "__main__":
    raise SystemExit(main())
