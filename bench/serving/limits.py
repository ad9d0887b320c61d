"""Measure whether the limits of keys hold under overload, with one gateway and with two, and what others notice of it.

    python -m bench.serving.limits ~/.cache/paceline/models/smollm2-135m-instruct --seconds 60 --out limits.json

For each kind of limit and each number of gateways, one key sends five times what it may, for a minute from rest.
Another key sends a request every half second, before and meanwhile. Before, the first key sends just what it may, so
that the difference is what the refused requests cost.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from bench.cache.prefix import start_hosts
from bench.common.namespaces import ONE_HOST
from bench.common.services import Services
from bench.common.systems import ending_on_sigterm
from bench.serving.load import new_file, percentile, table

REQUESTS, TOKENS = 240, 6000
"""Limits of the keys, per minute."""
PROMPT, ANSWER = [7] * 20, 10
"""The prompt, as token ids, and the tokens of each answer."""
OVERLOAD = 5
"""Multiple of its limit that the key sends."""
PAUSE_SECONDS = 0.5
OTHERS = "others"
"""The key without limits."""
MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One overload."""

    limit: str
    gateways: int
    used: int
    """Requests or tokens that were admitted."""
    part: float
    """`used`, divided by the limit for this time."""
    refused: int
    others_p50: float
    """Time of the other key's requests, in seconds."""
    others_p99: float
    others_p50_before: float
    """Time of the other key's requests while the first key sends no more than it may, in seconds."""
    others_p99_before: float


def keys_file(folder: Path) -> Path:
    """Write the keys: one for each overload and each time before, so that each begins at rest."""
    file = folder / "keys.toml"
    file.touch(0o600)
    lines = ['[others]\nkey = "others"']
    for number, when in itertools.product((1, 2), ("before", "overload")):
        lines.append(f'[requests-{number}-{when}]\nkey = "requests-{number}-{when}"\nrequests_per_minute = {REQUESTS}')
        lines.append(f'[tokens-{number}-{when}]\nkey = "tokens-{number}-{when}"\ntokens_per_minute = {TOKENS}')
    file.write_text("\n".join(lines) + "\n")
    return file


async def ask(http: httpx.AsyncClient, url: str, key: str) -> tuple[int, int, float]:
    """Send a request. Returns its status, the tokens that it used and its time in seconds.

    Raises RuntimeError if it is refused for another reason than a limit.
    """
    body = {"prompt": PROMPT, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    answer = await http.post(f"{url}/v1/completions", json=body, headers={"x-api-key": key})
    if answer.status_code not in ((200,) if key == OTHERS else (200, 429)):
        raise RuntimeError(f"a request of the key {key} was answered with {answer.status_code}: {answer.text}")
    tokens = int(answer.json()["usage"]["total_tokens"]) if answer.status_code == 200 else 0
    return answer.status_code, tokens, time.perf_counter() - began


async def load(
    http: httpx.AsyncClient, urls: Sequence[str], key: str, rate: float, seconds: float
) -> tuple[list[tuple[int, int, float]], list[float]]:
    """Send requests of a key at a rate per second, and others beside them. Returns the answers, and times of others."""
    turns = itertools.cycle(urls)
    began = time.perf_counter()

    async def every(pause: float, name: str) -> list[tuple[int, int, float]]:
        tasks = []
        for number in range(int(seconds / pause)):
            await asyncio.sleep(began + number * pause - time.perf_counter())
            tasks.append(asyncio.create_task(ask(http, next(turns), name)))
        return await asyncio.gather(*tasks)

    answers, others = await asyncio.gather(every(1 / rate, key), every(PAUSE_SECONDS, OTHERS))
    return answers, [took for _, _, took in others]


async def measure(urls: Sequence[str], seconds: float) -> list[Figures]:
    """Return the figures of all overloads."""
    found = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, trust_env=False, limits=limits) as http:
        for name, limit, size in (("requests", REQUESTS, 1), ("tokens", TOKENS, len(PROMPT) + ANSWER)):
            for count in (1, 2):
                fair, key = limit / size / MINUTE, f"{name}-{count}"
                _, before = await load(http, urls[:count], f"{key}-before", fair, min(seconds, 20.0))
                answers, others = await load(http, urls[:count], f"{key}-overload", fair * OVERLOAD, seconds)
                used = sum(tokens if name == "tokens" else 1 for status, tokens, _ in answers if status == 200)
                refused = sum(status == 429 for status, *_ in answers)
                part = used / (limit * seconds / MINUTE)
                found.append(Figures(name, count, used, part, refused, *_percentiles(others), *_percentiles(before)))
    return found


def _percentiles(times: Sequence[float]) -> tuple[float, float]:
    return percentile(times, 50), percentile(times, 99)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.limits", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument(
        "--seconds",
        type=float,
        default=MINUTE,
        help="length of each overload in seconds; at least 60",
    )
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    options = parser.parse_args()
    ending_on_sigterm()
    worker = ("--threads=1",)
    try:
        with tempfile.TemporaryDirectory() as folder:
            gateway = (f"--api-keys-file={keys_file(Path(folder))}",)
            with Services(
                Path(folder), options.model, ONE_HOST, prefill=worker, decode=worker, gateway=gateway
            ) as stack:
                start_hosts(stack, 1)
                names = [stack.start_gateway(), stack.start_gateway()]
                for name in names:
                    stack.processes[name].wait_for("serving ")
                found = asyncio.run(measure([stack.url_of(name) for name in names], options.seconds))
    except (RuntimeError, TimeoutError, httpx.HTTPError) as error:
        print(f"bench.serving.limits: {error!r}", file=sys.stderr)
        return 1
    rows = [
        [each.limit, str(each.gateways), str(each.used), f"{each.part:.3f}", str(each.refused)]
        + [f"{1000 * value:.0f}" for value in (each.others_p50_before, each.others_p50)]
        + [f"{1000 * value:.0f}" for value in (each.others_p99_before, each.others_p99)]
        for each in found
    ]
    head = [
        "limit",
        "gateways",
        "used",
        "of the limit",
        "refused",
        "others' p50 before, ms",
        "p50",
        "p99 before",
        "p99",
    ]
    print(table(head, rows))
    if options.out:
        options.out.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
