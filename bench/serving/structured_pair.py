"""Compare two servers at answers under JSON schemas: the time to the first token, and tokens per second after it.

    python -m bench.serving.structured_pair http://127.0.0.1:8061 http://127.0.0.1:8062 --count 64

Every schema is new to both servers, which take turns with the same prompt. After each schema comes the same prompt
without one, and after eight of them eight new schemas at once. A ratio is the first server's figure divided by the
second one's, as the median of pairs. The first token of a burst is the median of its answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from bench.serving.load import table
from bench.serving.structured import Schema, random_schema

MAX_TOKENS = 96
BURST = 8


class Timing(NamedTuple):
    """The times of one answer or one burst."""

    first: float
    """Seconds until the first token."""
    rate: float
    """Tokens per second after it."""


async def ask(client: httpx.AsyncClient, url: str, prompt: str, schema: Schema | None, salt: str) -> Timing:
    """Return the times of one streamed answer. Raises RuntimeError if the server answers with an error."""
    body = {
        "model": (await client.get(f"{url}/v1/models")).json()["data"][0]["id"],
        "prompt": prompt,
        "temperature": 1.0,
        "seed": 7,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
    }
    if schema is not None:
        wanted = {"name": "document", "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": wanted}
    begun, first, tokens = time.perf_counter(), 0.0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if reply.status_code != 200 or '"error"' in line[:16]:
                raise RuntimeError(f"{url} answers {reply.status_code}: {line}")
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                if not first and event["choices"] and event["choices"][0]["text"]:
                    first = time.perf_counter()
    return Timing(first - begun, max(1, tokens - 1) / (time.perf_counter() - first))


async def burst(client: httpx.AsyncClient, url: str, schemas: Sequence[Schema], salt: str) -> Timing:
    """Return the times of several answers at once."""
    asked = [ask(client, url, prompt_of(each), each, f"{salt}-{index}") for index, each in enumerate(schemas)]
    answers = await asyncio.gather(*asked)
    return Timing(statistics.median(each.first for each in answers), sum(each.rate for each in answers))


def prompt_of(schema: Schema) -> str:
    return f"A JSON document for the schema {json.dumps(schema)}:\n"


async def compare(first: str, second: str, count: int) -> dict[str, list[tuple[Timing, Timing]]]:
    """Return pairs of times for each kind of request, the first server's before the second one's."""
    rng, pairs = random.Random(3), defaultdict(list)
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        for url in (first, second):
            await ask(client, url, "{", {"type": "object"}, "warm up")
        for index in range(count):
            order = (first, second) if index % 2 else (second, first)
            schema = random_schema(rng)
            for kind, wanted in (("new schema", schema), ("no schema", None)):
                times = {url: await ask(client, url, prompt_of(schema), wanted, f"{kind} {index}") for url in order}
                pairs[kind].append((times[first], times[second]))
            if index % BURST == BURST - 1:
                schemas = [random_schema(rng) for _ in range(BURST)]
                times = {url: await burst(client, url, schemas, f"burst {index}") for url in order}
                pairs[f"{BURST} new schemas at once"].append((times[first], times[second]))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", help="URL of the first server")
    parser.add_argument("second", help="URL of the second server")
    parser.add_argument("--count", type=int, default=64, help="number of schemas, besides those of bursts")
    options = parser.parse_args()
    rows = []
    for kind, pairs in asyncio.run(compare(options.first, options.second, options.count)).items():
        firsts = [statistics.median(pair[side].first for pair in pairs) * 1000 for side in (0, 1)]
        ratios = [statistics.median(one[field] / other[field] for one, other in pairs) for field in (0, 1)]
        rows.append([kind, *(f"{each:.0f}" for each in firsts), *(f"{each:.3f}" for each in ratios)])
    print(table(["kind", "first token, ms", "the second's", "ratio", "ratio of tokens/s"], rows))


if __name__ == "__main__":
    main()
