"""Compare two servers with vLLM's own benchmark client: medians of several rounds, and their ratio.

    python -m bench.serving.headline --client VENV --tokenizer FOLDER \
        ours=http://127.0.0.1:8061 theirs=http://127.0.0.1:8062 \
        --start ours='paceline serve --port 8061' --start theirs='VENV/bin/vllm serve FOLDER --port 8062'

VENV is a virtual environment with vLLM (`vllm bench serve`). FOLDER is a model folder with the tokenizer of both
servers. Both get the same prompts. Each round has new prompts, so that no prefix cache has them. See
bench/common/turns.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.common.systems import ServerError, System
from bench.common.turns import add_options, compare, systems_of
from bench.serving.load import Round
from paceline.core.env import child_environment

CLIENT_SECONDS = 1800.0
"""Time limit of the client for one workload of one round."""
PERCENTILES = (50, 90, 99)


class Headline(NamedTuple):
    input_tokens: int
    output_tokens: int
    concurrency: int
    prompts: int


WORKLOADS = {
    "one": Headline(128, 128, concurrency=1, prompts=8),
    "eight": Headline(128, 128, concurrency=8, prompts=32),
    "prompt-heavy": Headline(512, 64, concurrency=16, prompts=32),
}


def command(vllm: Path, tokenizer: Path, url: str, workload: Headline, seed: int, results: Path) -> list[str]:
    """Return the client's command line. The client asks the server for the name of its model."""
    options = {
        "backend": "openai",
        "base-url": url.rstrip("/"),
        "endpoint": "/v1/completions",
        "tokenizer": tokenizer,
        "dataset-name": "random",
        "random-input-len": workload.input_tokens,
        "random-output-len": workload.output_tokens,
        "num-prompts": workload.prompts,
        "max-concurrency": workload.concurrency,
        "num-warmups": 2,
        "temperature": 0,
        "seed": seed,
        "percentile-metrics": "ttft,tpot,itl",
        "metric-percentiles": ",".join(map(str, PERCENTILES)),
        "result-dir": results.parent,
        "result-filename": results.name,
    }
    flags = ["--ignore-eos", "--save-result", "--disable-tqdm"]
    return [str(vllm), "bench", "serve", *(f"--{name}={value}" for name, value in options.items()), *flags]


def figures(result: dict[str, Any]) -> dict[str, float]:
    """Return the client's results under the names of bench.serving.load. Raises ServerError if one is missing."""
    try:
        failed = float(result["failed"])
        found = {"requests": result["completed"] + failed, "failures": failed, "seconds": result["duration"]}
        found |= {
            f"{name}_ms_p{percent}": result[f"p{percent}_{name}_ms"]
            for name in ("ttft", "tpot", "itl")
            for percent in PERCENTILES
        }
        found["output_tokens_per_s"] = result["output_throughput"]
        found["total_tokens_per_s"] = result["total_token_throughput"]
    except KeyError as error:
        raise ServerError(f"the client's results do not contain {error}") from error
    return found


def measure(vllm: Path, tokenizer: Path, system: System, workload: Headline, seed: int) -> dict[str, float]:
    """Run one workload on one system and return its figures. Raises ServerError if the client fails."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        try:
            done = subprocess.run(
                command(vllm, tokenizer, system.url, workload, seed, results),
                env=child_environment(HF_HUB_OFFLINE="1", NO_PROXY="*"),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=CLIENT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServerError(f"the client {vllm}: {error}") from error
        if done.returncode or not results.exists():
            last = "\n".join(done.stdout.splitlines()[-15:])
            raise ServerError(f"the client ended with status {done.returncode} against {system.name}:\n{last}")
        return figures(json.loads(results.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.headline", description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--client", type=Path, required=True, metavar="VENV", help="environment with bin/vllm")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FOLDER", help="model folder")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="may be repeated; default: all")
    parser.add_argument(
        "--prompts", type=int, default=0, help="requests of each workload; default: the workload's own number"
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="seed of prompts; default: a new one")
    args = parser.parse_args()
    systems, vllm = systems_of(parser, args), args.client / "bin" / "vllm"
    if not vllm.exists():
        parser.error(f"there is no {vllm}")

    def turn(system: System, number: int) -> Round:
        found = {}
        for name in args.workload or WORKLOADS:
            workload = WORKLOADS[name]._replace(prompts=args.prompts or WORKLOADS[name].prompts)
            found[name] = {"all": measure(vllm, args.tokenizer, system, workload, args.seed + number)}
        return found

    return compare(parser, args, systems, turn)


if __name__ == "__main__":
    raise SystemExit(main())
