"""The decode loop alone, on a real model: what running ahead and drafting give, and whether tokens stay the same.

    python -m bench.decode_loop ~/.cache/paceline/smollm2-135m-instruct --batch 1 --batch 8 --rounds 3

Each round runs every way of working in turn, on the same requests; the table holds medians. The bubble is the time that
the compute thread stood still although there was work, of the whole, as the loop itself has measured it. With --profile
a profiler (py-spy) looks on from outside: "idle" is its share of looks at which the compute thread computed nothing.
Tokens are compared with those of the first way.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import queue
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core import env

env.share_cores()

import tokenizers  # noqa: E402
import torch  # noqa: E402

from paceline.core.hashing import HashChain  # noqa: E402
from paceline.core.speculative import parse_speculative_config  # noqa: E402
from paceline.core.types import Key, SamplingParams  # noqa: E402
from paceline.engine.engine import Engine  # noqa: E402
from paceline.engine.loading import Loaded, load  # noqa: E402
from paceline.engine.request import Request  # noqa: E402
from paceline.engine.scheduler import Limits, Scheduler  # noqa: E402
from paceline.engine.speculation import Speculation  # noqa: E402
from paceline.engine.step import Event, Sampled  # noqa: E402
from paceline.kernels import select_kernels  # noqa: E402

NGRAM = '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'
WAYS = (
    ("one step, no drafts", 1, ""),
    ("two steps, no drafts", 2, ""),
    ("one step, ngram", 1, NGRAM),
    ("two steps, ngram", 2, NGRAM),
)
MAX_LEN = 1024

_LIST = ", ".join(f"item {number}: {name}" for number, name in enumerate(("apple", "bread", "candle", "drum") * 4))
TEXTS = {
    "copy": f"Repeat this list word for word, again and again.\n{_LIST}\n{_LIST}\n",
    "story": "Once upon a time there was a dragon who wanted to learn how to bake bread.",
}


@dataclass(frozen=True, slots=True)
class Run:
    tokens_per_second: float
    bubble: float
    """Of the whole time."""
    accepted_length: float
    """Tokens that a request got from a step, on average."""
    tokens: list[list[int]]
    idle: float = math.nan
    """Of the profiler's looks, from the first prompt on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--text", choices=sorted(TEXTS), action="append")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="let py-spy look on, which must be installed")
    options = parser.parse_args()
    device, dtype = torch.device("cpu"), getattr(torch, options.dtype)
    kernels = select_kernels(device, "auto")
    ways = {
        name: (steps, load(options.model, dtype, device, kernels, parse_speculative_config(config)))
        for name, steps, config in WAYS
    }
    tokenizer = tokenizers.Tokenizer.from_file(str(options.model / "tokenizer.json"))
    figures = f"{'tok/s':>8}{'ratio':>7}{'bubble':>9}{'idle':>8}{'tokens a step':>15}"
    print(f"{'text':<8}{'batch':<7}{'way':<24}{figures}  same tokens")
    for text in options.text or TEXTS:
        for batch in options.batch or (1, 8):
            prompts = [tokenizer.encode(f"{index}. {TEXTS[text]}").ids for index in range(batch)]
            runs = {name: [] for name in ways}
            for _ in range(options.rounds):
                for name, (steps, loaded) in ways.items():
                    with profiled() if options.profile else contextlib.nullcontext([]) as looks:
                        done = run(loaded, steps, prompts, options.tokens)
                    runs[name].append(replace(done, idle=idle_share(looks)))
            _print(text, batch, runs)


def run(loaded: Loaded, steps_in_flight: int, prompts: Sequence[list[int]], max_tokens: int) -> Run:
    """Greedy tokens for all prompts side by side; the time is from the first token to the last."""
    blocks = [group.blocks_for(MAX_LEN) for group in loaded.layout.groups]
    element_bytes = loaded.layout.itemsize
    dtype = torch.float32 if element_bytes == 4 else torch.bfloat16
    pool = torch.zeros(len(prompts) * sum(blocks) * loaded.layout.slot_bytes // element_bytes, dtype=dtype)
    limits = Limits(512, MAX_LEN, len(prompts), loaded.max_drafts)
    events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
    engine = Engine(
        Scheduler(limits, Speculation(loaded.max_drafts)),
        loaded.runner(pool, limits),
        events.put,
        _fail,
        steps_in_flight,
    )
    engine.start()
    slots = iter(range(len(prompts) * sum(blocks)))
    tokens: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        tables = [[next(slots) for _ in range(count)] for count in blocks]
        params = SamplingParams(max_tokens=max_tokens)
        chain = HashChain(loaded.layout.fingerprint)
        engine.add(Request(Key(str(index), 1, 1), [*prompt], len(prompt), params, loaded.layout, chain, tables))
    left, began, bubble_before, counted = len(prompts), 0.0, 0.0, 0
    while left:
        for event in events.get(timeout=120):
            if isinstance(event, Sampled):
                if not began and all(tokens[index] for index in range(len(prompts))):
                    began, bubble_before = time.perf_counter(), engine.bubble_seconds
                    counted = sum(map(len, tokens))
                tokens[int(event.key.request_id)].append(event.token.id)
                left -= event.reason is not None
    seconds = time.perf_counter() - began
    engine.stop()
    given = sum(map(len, tokens)) - counted
    bubble = (engine.bubble_seconds - bubble_before) / seconds
    return Run(given / seconds, bubble, engine.stats.sampled_tokens / engine.stats.steps / len(prompts), tokens)


@contextlib.contextmanager
def profiled() -> Iterator[list[str]]:
    """Lets py-spy look at this process; the list then holds its lines: frames of a thread, and how often they came."""
    looks: list[str] = []
    with tempfile.NamedTemporaryFile("r") as file:
        command = ["py-spy", "record", "--pid", str(os.getpid()), "--output", file.name, "--format", "raw"]
        options = ["--rate", "200", "--threads", "--idle", "--nonblocking", "--duration", "3600"]
        spy = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        time.sleep(1.0)  # it reads symbols first
        yield looks
        spy.send_signal(signal.SIGINT)
        output, _ = spy.communicate(timeout=60)
        if not (lines := file.read().splitlines()):
            raise SystemExit(f"py-spy has seen nothing: {output.decode()}")
        looks += lines


def idle_share(looks: Sequence[str]) -> float:
    """How often the compute thread was seen outside of steps."""
    seen = {True: 0, False: 0}
    for line in looks:
        frames, _, count = line.rpartition(" ")
        if "engine-compute" in frames:
            seen["ModelRunner.execute" in frames] += int(count)
    return seen[False] / sum(seen.values()) if looks else math.nan


def _print(text: str, batch: int, runs: dict[str, list[Run]]) -> None:
    first = next(iter(runs.values()))
    base = statistics.median(run.tokens_per_second for run in first)
    for name, own in runs.items():
        speed = statistics.median(run.tokens_per_second for run in own)
        bubble, idle = (statistics.median(getattr(run, name) for run in own) for name in ("bubble", "idle"))
        length = statistics.median(run.accepted_length for run in own)
        same = sum(a == b for run in own for a, b in zip(run.tokens, first[0].tokens))
        print(
            f"{text:<8}{batch:<7}{name:<24}{speed:>8.1f}{speed / base:>7.2f}{bubble:>9.2%}{idle:>8.2%}{length:>15.2f}"
            f"  {same} of {len(own) * batch}",
            flush=True,
        )


def _fail(error: BaseException) -> None:
    raise SystemExit(f"the engine failed: {error}")


if __name__ == "__main__":
    main()
