"""Run every measuring command of CONTRIBUTING.md and the pages of results for seconds, so that none breaks unseen.

    python -m bench.smoke                                       # or `make bench-smoke`
    python -m bench.smoke bench.serving.headline --vllm VENV            # only this command, with vLLM's client

A command passes if it ends with status 0; nobody looks at its figures. The model is random, with two small layers and
SmolLM2's tokenizer. Commands that need something which this machine lacks are named at the end. The exit code is 1 if
a command fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.common.services import free_port
from bench.common.systems import System, ending_on_sigterm, running
from paceline.core.env import default_cache_dir
from paceline.models.sources.assets import resolve_model

SECONDS = 300.0
"""Longest time for one command. Most take a few seconds on a quiet machine."""
TOKENIZER = "smollm2-135m-instruct"

COMMANDS: Mapping[str, str] = {
    # The first two make the files that others read.
    "bench.compute.experts": "model {model} --tokenizer {tokenizer} --hidden 128 --layers 2 --experts 4 --top-k 2"
    " --inner 64 --heads 4 --vocab 49152",
    "bench.compute.experts_gguf": "{model} {folder}/tiny.gguf",
    "bench.cache.agent_loop": "{url} --calls 2 --flood-tokens 300 --result-words 5",
    "bench.serving.batches": "--lines 4 --rounds 1 --seconds 1",
    "bench.cache.policy": "agents --blocks 1000 --policies lru --owners 10",
    "bench.cache.survey": "--traces agents --blocks 1000",
    "bench.serving.compare": "a={url} b={url} --rounds 1 --workload shared-prefix",
    "bench.fleet.control_plane": "{model} --workers 16 --gateways 1 --processes 1 --blocks 10 --rate 2 --seconds 1"
    " --settle 3 --fault-seconds 1 --changes 1",
    "bench.compute.cores": "--rows 1 --rounds 1",
    "bench.compute.decode_loop": "{model} --batch 1 --text story --tokens 8 --rounds 1",
    "bench.compute.early_stop": "--width 96 --tokens 64 --generated 2 --chunk 32 --rounds 1",
    "bench.compute.encode": "--tokens 14 --rounds 1 --layers 1",
    "bench.serving.equality": "{model} --requests 4 --concurrency 2 --way 'synchronous, ngram'",
    "bench.fleet.flips": "--actions 1 --requests 2",
    "bench.fleet.sleep": "--model {model} --rounds 1 -- --kv-memory 16MiB",
    "bench.compute.formats": "{model} --format int4 --starts 1",
    "bench.compute.forward": "{model} --rounds 1",
    "bench.gateway.alone": "{model} --streams 2 --tokens 8 --rounds 1 --parsers",
    "bench.gateway.streams": "{model} --streams 4 --tokens 12 --workers 2 --consoles 1 --seconds 1 --rounds 1",
    "bench.gpu": "--out {folder}/gpu --small --only copies --only handoff --only experts",
    "bench.transfer.handoff": "--model {model} --prompt-tokens 100 --requests 2",
    "bench.serving.headline": "a={url} b={url} --client {vllm} --tokenizer {model} --workload one"
    " --prompts 2 --rounds 1",
    "bench.gateway.hops": "",
    "bench.gateway.hostile_bodies": "--bodies 2 --seconds 0.5 --no-goal --only /tokenize"
    " --only /v1/completions/derender",
    "bench.transfer.hosts": "{model} --prompt-tokens 100 --requests 2",
    "bench.compute.kernels": "--rounds 1 --only rms_norm",
    "bench.compute.lora": "{model} --rounds 1 --rank 2",
    "bench.compute.lora_loading": "{model} --rounds 1 --rank 2 --tokens 20",
    "bench.compute.kv_cache": "{model} --context 64 --batch 1 --tokens 2 --rounds 1 --text README.md --text-tokens 600",
    "bench.serving.limits": "{model} --seconds 2",
    "bench.serving.load": "--url {url} --workload one",
    "bench.gateway.media_hostile": "--count 20 --warm-up 5 --quiet-seconds 1",
    "bench.serving.media_ttft": "--rounds 1 --burst 1 --layers 1",
    "bench.transfer.messages": "--messages 8 --rounds 1",
    "bench.serving.overhead": "--model {model} --rounds 1 --workload one",
    "bench.serving.overload": "{model} --seconds 2 --probe-seconds 1",
    "bench.serving.phases": "{url} --workload one",
    "bench.serving.placed": "--help",
    "bench.gateway.placement": "--workers 20 --placements 5",
    "bench.fleet.planner": "--minutes 4 --warm-up 1 --only",
    "bench.fleet.planner_live": "{model} --minutes 0.2 --warm-up 0 --only planner",
    "bench.fleet.pod_lifecycle": "--streams 2 --concurrency 2 --pods 1 --hurry 20",
    "bench.serving.pooling": "a=http://127.0.0.1:{port} b=http://127.0.0.1:{other_port} --model all-minilm-l6-v2"
    " --start 'a={serve} all-minilm-l6-v2 --port {port}' --start 'b={serve} all-minilm-l6-v2 --port {other_port}'"
    " --rounds 1 --tokens 16 --clients 1 --batch 2 --seconds 0.5",
    "bench.cache.prefix": "{model} --prompt-tokens 100 --prompts 1 --turns 1 --kv-memory 64MiB",
    "bench.serving.q4": "--peer {llama} --gguf {folder}/tiny.gguf --prompt-tokens 32 --tokens 4"
    " --requests 1 --rounds 1",
    "bench.fleet.rolling_upgrade": "{model} --streams 4 --clients 1 --tokens 4",
    "bench.cache.routing": "{model} --rounds 1 --systems 1 --system-tokens 50 --conversations 1"
    " --turns 1 --kv-memory 64MiB",
    "bench.compute.scaling": "{model} --batch 1 --context 64 --tokens 2 --rounds 1",
    "bench.fleet.simulate_error": "{model} --load 'short chats' --load burst-32 --rounds 1 --seconds 5",
    "bench.fleet.simulate_scale": "--trace {trace} --workers 8 --requests 50",
    "bench.serving.sentence_transformers_peer": "{encoder}",
    "bench.serving.soak": "--hours 0.005 --rate 4",
    "bench.serving.start": "--model {model} --rounds 1",
    "bench.serving.structured": "--url {url} --count 2",
    "bench.serving.structured_pair": "{url} {url} --count 1",
    "bench.transfer.swap": "--model {model} --prompts 16 --prompt-tokens 200 --tokens 8 --rounds 1"
    " --concurrency 2 --small 1MiB",
    "bench.serving.tools": "--url {url} --count 2 --max-tokens 64",
    "bench.serving.transformers_peer": "{model} --rounds 1",
    "bench.transfer.transport": "--rounds 1 --blocks 2 --block-kib 16 --one-host",
    "tests.fuzz.constraints": "--model {model} --count 20",
    "tests.fuzz.pooling": "--count 20",
    "tests.fuzz.run": "--seconds 2",
    "tests.proof.simulate": "--seeds 10",
    "tests.stack.families": "--family llama --prompts 1 --tokens 4",
}
"""The arguments of each command in a form of seconds."""

Check = Callable[[Mapping[str, str]], str]
"""A function that returns a text with the things that a command lacks; "" if nothing is missing."""


def _root(values: Mapping[str, str]) -> str:
    return "" if os.geteuid() == 0 and shutil.which("ip") else "root and iproute2"


def _package(name: str) -> str:
    return "" if importlib.util.find_spec(name) else f"the package {name}"


NEEDS: Mapping[str, Check] = {
    "bench.fleet.sleep": lambda values: "" if shutil.which("fincore") else "fincore of util-linux",
    "bench.serving.sentence_transformers_peer": lambda values: _package("sentence_transformers"),
    "bench.serving.headline": lambda values: "" if values["vllm"] else "vLLM's client: --vllm VENV",
    "bench.serving.q4": lambda values: "" if values["llama"] else "llama-cpp-python: --llama VENV",
    "bench.transfer.hosts": _root,
    "bench.cache.prefix": _root,
    "bench.gateway.media_hostile": _root,
    "bench.fleet.rolling_upgrade": lambda values: "the release before, which takes minutes to build",
}


def write_trace(path: Path) -> None:
    """Write a trace of 50 requests in Mooncake's format."""
    draw = random.Random(1)
    lines = [
        {"timestamp": 100 * index, "input_length": 1024, "output_length": 8, "hash_ids": [draw.randrange(20), index]}
        for index in range(50)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(name: str, values: Mapping[str, str]) -> str:
    """Run a command. Return the failure as a text; "" if it passed."""
    command = [sys.executable, "-m", name, *shlex.split(COMMANDS[name].format_map(values))]
    began = time.monotonic()
    print(f"python -m {name}", end=" ", flush=True)
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        print("DID NOT END")
        return f"it did not end in {SECONDS:g} seconds"
    print(f"{'passed' if done.returncode == 0 else 'FAILED'} after {time.monotonic() - began:.1f} s")
    return "" if done.returncode == 0 else f"status {done.returncode}\n" + "\n".join(done.stdout.splitlines()[-15:])


def run_all(names: list[str], values: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Run commands. Return the failures, and the missing things, each by command."""
    failed: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in names:
        if lacks := NEEDS.get(name, lambda values: "")(values):
            missing[name] = lacks
        elif why := run(name, values):
            failed[name] = why
    return failed, missing


def main() -> int:
    ending_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m bench.smoke", description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="*", metavar="NAME", help="commands to run, such as bench.serving.load [all]")
    parser.add_argument("--vllm", default="", metavar="VENV", help="environment with vLLM's benchmark client")
    parser.add_argument("--llama", default="", metavar="VENV", help="environment with llama-cpp-python")
    options = parser.parse_args()
    if unknown := set(options.commands) - COMMANDS.keys():
        parser.error(f"no such command: {', '.join(sorted(unknown))}")
    first = list(COMMANDS)[:2]
    names = [name for name in COMMANDS if name in first or name in options.commands or not options.commands]
    with tempfile.TemporaryDirectory(prefix="paceline-smoke-") as folder:
        tokenizer = resolve_model(TOKENIZER, default_cache_dir(), print)
        port = free_port()
        values = {
            "folder": folder,
            "model": f"{folder}/tiny",
            "tokenizer": str(tokenizer),
            "encoder": str(resolve_model("all-minilm-l6-v2", default_cache_dir(), print)),
            "trace": f"{folder}/trace.jsonl",
            "url": f"http://127.0.0.1:{port}",
            "serve": f"{sys.executable} -m paceline serve",
            "port": str(free_port()),
            "other_port": str(free_port()),
            "vllm": options.vllm,
            "llama": options.llama,
        }
        write_trace(Path(values["trace"]))
        serve = (sys.executable, "-m", "paceline", "serve", values["model"])
        serve += ("--port", str(port), "--tool-call-parser", "hermes")
        stack = System("the stack", values["url"], serve)
        asking = [name for name in names if "{url}" in COMMANDS[name]]
        others = [name for name in names[2:] if name not in asking]
        results = [run_all(first, values), run_all(others, values)]
        if asking:
            with running(stack):
                results.append(run_all(asking, values))
    failed = {name: why for each, _ in results for name, why in each.items()}
    missing = {name: what for _, each in results for name, what in each.items()}
    for name, what in missing.items():
        print(f"NOT TRIED: python -m {name} needs {what}")
    for name, why in failed.items():
        print(f"\nFAILED: python -m {name} {COMMANDS[name]}\n{why}")
    print(f"\n{len(names) - len(failed) - len(missing)} passed, {len(failed)} failed, {len(missing)} not tried")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
