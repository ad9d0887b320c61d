"""Measure the handoff of a prompt's blocks on one host: how long it takes, and how many bytes it copies.

    python -m bench.transfer.handoff --prompt-tokens 2000 --requests 20 -- --threads 1

Arguments after -- go to `paceline serve`. Prompts are random and sent one after the other. Time is counted from when
the prefill worker has the last step's results and is about to give the blocks away, until the decode worker has the
answer that it has adopted them. Both workers log these times by the same clock, and write the log lines after the
handoff. The number of copied bytes is reported by the decode worker.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx

from bench.common.services import serving
from bench.common.systems import ending_on_sigterm
from bench.serving.load import table


def handoffs(lines: Iterable[str]) -> dict[str, float]:
    """Return the seconds of each handoff by request id, from the lines of a stack's JSON log."""
    sealed: dict[str, float] = {}
    adopted: dict[str, float] = {}
    for line in lines:
        if line.startswith("{"):
            told = json.loads(line)
            if "sealed_at" in told:
                sealed[told["request_id"]] = told["sealed_at"]
            elif str(told["message"]).startswith("adopted "):
                adopted[told["request_id"]] = datetime.datetime.fromisoformat(told["time"]).timestamp()
    return {name: at - sealed[name] for name, at in adopted.items() if name in sealed}


def measure(model: str, flags: list[str], prompt_tokens: int, requests: int) -> dict[str, Any]:
    """Run a stack and measure its handoffs. Raises RuntimeError if it does not start, or its log lacks a handoff."""
    copied, blocks, names = 0, 0, []
    options = ["--log-level=info", "--log-format=json", *flags]
    with tempfile.TemporaryDirectory() as folder:
        with (
            serving(log := Path(folder, "log"), model, *options) as (_, url),
            httpx.Client(base_url=url, timeout=120) as http,
        ):
            # The first two requests are the warm-up: the services connect, and kernels are compiled.
            for number in range(requests + 2):
                prompt = [random.randrange(100, 20_000) for _ in range(prompt_tokens)]
                answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "temperature": 0})
                told = http.get(f"/trace/{answer.raise_for_status().json()['id']}").json()
                if number >= 2:
                    (part,) = told["parts"]
                    handoff = part["attempts"][-1]["handoff"]
                    copied, blocks = copied + handoff["bytes_moved"], blocks + handoff["blocks"]
                    names.append(part["sequence_id"])
        seconds = handoffs(log.read_text().splitlines())
    if missing := [name for name in names if name not in seconds]:
        raise RuntimeError(f"{len(missing)} handoffs are missing in the log")
    return {"copied_bytes": copied, "blocks": blocks, "seconds": [seconds[name] for name in names]}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer.handoff", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or folder of the model [%(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="tokens of a prompt [%(default)s]")
    parser.add_argument("--requests", type=int, default=20, help="requests of the measurement [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("flags", nargs="*", help="options of `paceline serve`")
    options = parser.parse_args()
    ending_on_sigterm()
    try:
        found = measure(options.model, options.flags, options.prompt_tokens, options.requests)
    except RuntimeError as error:
        print(f"bench.transfer.handoff: {error}", file=sys.stderr)
        return 1
    milliseconds = sorted(1000 * each for each in found["seconds"])
    rows = [
        ["handoffs", f"{len(milliseconds)}"],
        ["blocks of each", f"{found['blocks'] / len(milliseconds):g}"],
        ["bytes copied", f"{found['copied_bytes']}"],
        ["from sealed to adopted, ms, median", f"{statistics.median(milliseconds):.2f}"],
        ["least and most", f"{milliseconds[0]:.2f} to {milliseconds[-1]:.2f}"],
    ]
    print(table(["figure", f"{options.prompt_tokens} tokens"], rows))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
