"""Kill workers of a real stack while many adapters come and go: `python -m tests.stack.chaos_adapters --minutes 2`.

Many small adapters of a tiny model lie in a folder, and a worker has only some of them in memory. Clients ask for names
by Zipf, so that adapters are read all the time. Beside them, names get other content and are taken away, and workers
are killed. Each answer must have the greedy tokens that `transformers` computes for the content that the name had when
the request was sent, or that it got meanwhile. At the end no block may be leased, and no worker may have more adapters
in memory than it is allowed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import httpx
import transformers

from tests.adapters import merged, write_adapter
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.stack.processes import Stack, serve
from tests.stack.reference import PROMPTS
from tests.stack.test_models import TOKENS, generated
from tests.tiny_checkpoints import write_tiny

ASKED = PROMPTS[:4]
VICTIMS = ("decode", "prefill", "kvtransfer")
"""Roles that are killed. If the only gateway is killed, the names that came meanwhile are forgotten."""
SILENCE_SECONDS = 300.0
"""Longest wait for an answer. Other processes may have the cores meanwhile."""
UNLOADED = -1
"""Stands for the content of a name that was taken away."""


@dataclass(slots=True)
class _Change:
    """A change of a name's content. It takes effect at some instant between `begin` and `end`."""

    content: int
    begin: float
    end: float = float("inf")


@dataclass(slots=True)
class Names:
    """The contents that names have had."""

    changes: dict[str, list[_Change]] = field(default_factory=dict)

    def possible(self, name: str, begin: float, end: float) -> set[int]:
        """Return the contents that a name may have had at some instant between two instants."""
        changes = [*self.changes[name], None]
        return {
            change.content
            for change, after in itertools.pairwise(changes)
            if change is not None and change.begin <= end and (after is None or after.end >= begin)
        }

    @contextlib.contextmanager
    def changing(self, name: str, content: int) -> Iterator[None]:
        """Note that the name changes while the context is open. If this fails, both contents remain possible."""
        change = _Change(content, time.monotonic())
        self.changes.setdefault(name, []).append(change)
        yield
        change.end = time.monotonic()


@dataclass(slots=True)
class Report:
    """What happened."""

    answers: list[tuple[str, int, frozenset[int], list[int]]] = field(default_factory=list)
    """Name, index of the prompt, possible contents, and tokens of each answer."""
    unknown: int = 0
    """Number of requests for names that had been taken away."""
    changes: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Reference:
    """The greedy tokens of `transformers` with each adapter merged into the model."""

    def __init__(self, model: transformers.PreTrainedModel, folder: Path) -> None:
        self._model, self._folder = model, folder
        self.tokens = cache(self._generate)

    def _generate(self, content: int, prompt: int) -> list[int]:
        return generated(merged(self._model, self._folder / str(content)), ASKED[prompt])


class Chaos:
    """Clients, changes of names and kills, until `over` is set."""

    def __init__(self, stack: Stack, http: httpx.AsyncClient, folder: Path, contents: int, draw: random.Random) -> None:
        self._stack, self._http, self._folder, self._draw = stack, http, folder, draw
        self._contents = range(contents)
        self._chances = list(itertools.accumulate(1 / (1 + index) for index in self._contents))
        self._names, self.report, self.over = Names(), Report(), asyncio.Event()

    async def name_all(self) -> None:
        """Give each adapter a name."""
        for content in self._contents:
            await self._load(f"adapter-{content}", content)

    async def ask(self) -> None:
        """Ask for one adapter after another, the first ones most often."""
        while not self.over.is_set():
            (rank,) = self._draw.choices(self._contents, cum_weights=self._chances)
            name, prompt = f"adapter-{rank}", self._draw.randrange(len(ASKED))
            fields = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            began = time.monotonic()
            answer = await self._http.post("/v1/completions", json={"model": name, "prompt": ASKED[prompt], **fields})
            possible = self._names.possible(name, began, time.monotonic())
            if answer.status_code == 404 and UNLOADED in possible:
                self.report.unknown += 1
            elif answer.status_code == 200:
                tokens = answer.json()["choices"][0]["token_ids"]
                self.report.answers.append((name, prompt, frozenset(possible), tokens))
            else:
                self.report.wrong.append(f"{name}: {answer.status_code} {answer.text}")

    async def change(self) -> None:
        """Give names other content, take names away, and give them back. The names that are used most change, too."""
        while not self.over.is_set():
            await asyncio.sleep(self._draw.uniform(0.05, 0.3))
            (rank,) = self._draw.choices(self._contents, cum_weights=self._chances)
            name = f"adapter-{rank}"
            if self._draw.random() < 0.3 and self._names.changes[name][-1].content != UNLOADED:
                with self._names.changing(name, UNLOADED):
                    answer = await self._http.post("/v1/unload_lora_adapter", json={"lora_name": name})
                self._note("unload", answer)
            else:
                await self._load(name, self._draw.choice(self._contents))

    async def _load(self, name: str, content: int) -> None:
        body = {"lora_name": name, "lora_path": str(self._folder / str(content)), "load_inplace": True}
        with self._names.changing(name, content):
            answer = await self._http.post("/v1/load_lora_adapter", json=body)
        self._note("load", answer)

    def _note(self, what: str, answer: httpx.Response) -> None:
        self.report.changes[what] += 1
        if answer.status_code != 200:
            self.report.wrong.append(f"{what}: {answer.status_code} {answer.text}")

    async def kill(self, pause: float) -> None:
        """Kill one process of a random role after each pause, if all roles have one."""
        while not self.over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), self._draw.uniform(0.5, 1.5) * pause)
            living = {role: self._stack.living(role) for role in VICTIMS}
            role = self._draw.choice(VICTIMS)
            if all(living.values()) and not self.over.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._draw.choice(living[role]), signal.SIGKILL)
                    self.report.kills[role] += 1


async def run(stack: Stack, folder: Path, options: argparse.Namespace) -> Report:
    """Run the chaos, and check what is left in the stack."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=SILENCE_SECONDS) as http:
        chaos = Chaos(stack, http, folder, options.adapters, random.Random(options.seed))
        await chaos.name_all()
        print(f"{options.adapters} adapters have names", flush=True)
        async with asyncio.TaskGroup() as group:
            for _ in range(options.clients):
                group.create_task(chaos.ask())
            group.create_task(chaos.change())
            group.create_task(chaos.kill(options.pause))
            await asyncio.sleep(60 * options.minutes)
            chaos.over.set()
        await stack.settled()
        for worker in stack.fleet()["workers"]:
            held = worker["stats"].get("lora_adapters", 0)
            print(worker["worker_id"], {name: value for name, value in worker["stats"].items() if "lora" in name})
            if held > options.memory:
                chaos.report.wrong.append(f"{worker['worker_id']} has {held} adapters in memory")
        print("MB at the end:", sorted(each.memory_info().rss >> 20 for each in stack.family()))
    return chaos.report


def check(report: Report, reference: Reference) -> None:
    """Compare all answers with the reference."""
    for name, prompt, possible, tokens in report.answers:
        wanted = [reference.tokens(content, prompt) for content in possible if content != UNLOADED]
        if tokens not in wanted:
            report.wrong.append(f"{name}, prompt {prompt}: {tokens} is of none of the contents {set(possible)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.stack.chaos_adapters", description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=int, default=1000, help="adapters in the folder [%(default)s]")
    parser.add_argument("--memory", type=int, default=32, help="adapters in a worker's memory [%(default)s]")
    parser.add_argument("--minutes", type=float, default=2.0, help="[%(default)s]")
    parser.add_argument("--clients", type=int, default=8, help="[%(default)s]")
    parser.add_argument("--pause", type=float, default=10.0, help="mean seconds between kills [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = write_toy_model(folder / "base")
        model = write_tiny(base, "llama", vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=256)
        for content in range(options.adapters):
            write_adapter(folder / str(content), model, seed=content, size=3.0)
        limits = ("--max-loras=4", f"--max-cpu-loras={options.memory}", "--max-model-len=1024", "--kv-memory=16MiB")
        fleet = ("--prefill=2", "--decode=2", "--dtype=float32", "--threads=1", "--max-seqs=8")
        with serve(folder / "log", str(base), "--enable-lora", *limits, *fleet) as stack:
            report = asyncio.run(run(stack, folder, options))
        check(report, Reference(model, folder))
    kinds = len({(content, prompt) for _, prompt, possible, _ in report.answers for content in possible})
    print(
        f"seed {options.seed}: {len(report.answers)} answers of {kinds} kinds, {report.unknown} for names without an "
        f"adapter; changes {dict(report.changes)}; kills {dict(report.kills)}; {len(report.wrong)} wrong",
        *report.wrong[:20],
        sep="\n",
    )
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
