"""Compare one stream of a packed GGUF file with llama.cpp: our stack over HTTP, llama.cpp called in its own process.

    python -m venv VENV && VENV/bin/pip install llama-cpp-python
    python -m bench.serving.q4 --peer VENV --gguf FILE.gguf --rounds 3

The two take turns and never run together: `paceline serve FILE.gguf --quantization gguf`, and llama.cpp's Python
binding. Prompts are random token ids of one length, and decoding is greedy. Prompt speed is measured from the request
to the first token, token speed from the first token to the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.common.services import serving
from bench.common.systems import ending_on_sigterm
from bench.common.workloads import Request, Workload
from bench.serving.load import Outcome, Server, ServerError, new_file, table

Figures = dict[str, list[float]]


def ours(model: str, flags: list[str], prompt_tokens: int, tokens: int, requests: int) -> Figures:
    """Measure our stack. Raises RuntimeError if it does not start, ServerError if a request fails."""
    source = random.Random()
    prompts = [tuple(source.choices(range(1000, 30_000), k=prompt_tokens)) for _ in range(requests + 1)]

    async def run(url: str) -> list[Outcome]:
        async with Server(url) as server:
            return await server.run(Workload("q4", tuple(Request(prompt, tokens) for prompt in prompts), 1))

    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder, "log"), model, "--quantization=gguf", *flags) as (_, url),
    ):
        outcomes = asyncio.run(run(url))[1:]  # the first request is the warm-up
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise ServerError(failed[0])
    spans = [(outcome.chunks[0] - outcome.sent, outcome.chunks[-1] - outcome.chunks[0]) for outcome in outcomes]
    return {
        "prompt tok/s": [prompt_tokens / first for first, _ in spans],
        "output tok/s": [(tokens - 1) / rest for _, rest in spans],
    }


def theirs(venv: Path, gguf: Path, prompt_tokens: int, tokens: int, requests: int) -> Figures:
    """Measure llama.cpp. Raises RuntimeError if it does not run."""
    sizes = (prompt_tokens, tokens, requests, os.cpu_count() or 1)
    command = [venv / "bin" / "python", Path(__file__).with_name("llama_cpp_peer.py"), gguf, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"llama.cpp failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    return {
        "prompt tok/s": [prompt_tokens / each["prompt_seconds"] for each in found],
        "output tok/s": [1 / each["token_seconds"] for each in found],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.q4", description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, required=True, help="venv with llama-cpp-python")
    parser.add_argument("--gguf", type=Path, required=True, help="GGUF file of the model")
    parser.add_argument("--model", default="", help="Paceline's name of the model; default: the file itself")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens of a prompt [%(default)s]")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer [%(default)s]")
    parser.add_argument("--requests", type=int, default=6, help="requests in each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the measurement [%(default)s]")
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    parser.add_argument("flags", nargs="*", help="options of `paceline serve`, after --")
    options = parser.parse_args()
    ending_on_sigterm()
    sizes = (options.prompt_tokens, options.tokens, options.requests)
    found: dict[str, list[Figures]] = {"ours": [], "llama.cpp": []}
    try:
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
            found["ours"].append(ours(options.model or str(options.gguf), options.flags, *sizes))
            found["llama.cpp"].append(theirs(options.peer, options.gguf, *sizes))
    except (RuntimeError, ServerError) as error:
        print(error, file=sys.stderr)
        return 1
    rows = []
    for figure in ("output tok/s", "prompt tok/s"):
        our_median, other = ([statistics.median(each[figure]) for each in found[name]] for name in found)
        cells = [f"{statistics.median(each):.1f} ({min(each):.1f}–{max(each):.1f})" for each in (our_median, other)]
        rows.append([figure, *cells, f"{statistics.median(our_median) / statistics.median(other):.2f}"])
    print(table(["figure", "ours", "llama.cpp", "ratio"], rows))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
