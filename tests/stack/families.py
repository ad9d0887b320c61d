"""Check every family of models through HTTP: greedy tokens of tiny random checkpoints must be those of `transformers`.

    python -m tests.stack.families [--family NAME ...] [--way NAME ...] [--prompts 32] [--tokens 64]

Each checkpoint runs in fp32 in each way: one worker of each role; two of each, with prompts in chunks of 32 tokens;
pools of their own with swapping; little memory with preemption and a disk tier; prompt lookup; two hosts; for Gemma 4,
an assistant that drafts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from bench.common.namespaces import ONE_HOST
from bench.serving.load import table
from paceline.core.kv_layout import make_layout
from paceline.kernels.reference import ReferenceKernels
from paceline.models.loader import load_model
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.stack.cluster import Cluster
from tests.stack.processes import serve
from tests.stack.reference import PROMPTS
from tests.stack.stacks import NGRAM
from tests.tiny_checkpoints import FAMILIES, write_gemma4_assistant, write_tiny

MODEL_LEN = 2048
TWO_HOSTS = "two hosts"
ASSISTANT = "assistant"
"""A way for Gemma 4 alone."""
WAYS: Mapping[str, tuple[str, ...]] = {
    "one of each": (),
    "two of each, chunks of 32": (
        *("--prefill=2", "--decode=2", "--threads=1", "--max-batched-tokens=32", "--max-seqs=32"),
    ),
    "pools": ("--kv-pool=device", "--kv-pool-memory={small}", "--kv-memory={large}"),
    "little memory, disk": ("--kv-memory={small}", "--kv-disk-size={large}", "--kv-disk-dir={scratch}"),
    "prompt lookup": (f"--speculative-config={json.dumps(NGRAM)}".replace("{", "{{").replace("}", "}}"),),
    TWO_HOSTS: (),
    ASSISTANT: ('--speculative-config={{"model": "{folder}/assistant", "adaptive": false}}',),
}
"""Options of a stack for each way of running it. Memories have room for 2 (small) and 12 (large) longest contexts."""


@dataclass(frozen=True)
class Checkpoint:
    """A tiny checkpoint in a folder, with its reference. A token is a byte of text."""

    folder: Path
    reference: transformers.PreTrainedModel

    def options(self, way: str, scratch: Path) -> list[str]:
        """Return the options of `paceline serve` for a way."""
        model = load_model(self.folder, torch.float32, ReferenceKernels(), torch.device("cpu"))
        layout = make_layout(model.group_shapes, torch.float32.itemsize, "")
        context = layout.slots_for(MODEL_LEN) * layout.slot_bytes
        places = {"folder": self.folder, "scratch": scratch}
        own = [option.format(small=2 * context, large=12 * context, **places) for option in WAYS[way]]
        return ["--dtype=float32", f"--max-model-len={MODEL_LEN}", *own]

    def first_difference(self, prompt: str, tokens: Sequence[int]) -> int | None:
        """Return the index of the first token that is not the reference's best one after those before it."""
        ids = torch.tensor([[*prompt.encode(), *tokens[:-1]]])
        with torch.inference_mode():
            best = self.reference(ids, use_cache=False).logits[0, -len(tokens) :].argmax(dim=-1).tolist()
        return next((index for index, pair in enumerate(zip(tokens, best)) if pair[0] != pair[1]), None)


def write_checkpoint(family: str, folder: Path) -> Checkpoint:
    """Write the checkpoint of a family to a folder, with a tokenizer of bytes."""
    write_toy_model(folder)
    sizes = {"vocab_size": VOCAB_SIZE}
    if family.startswith("gemma4"):
        write_gemma4_assistant(folder / "assistant", **sizes)
        sizes["vocab_size_per_layer_input"] = VOCAB_SIZE
    reference = write_tiny(folder, family, **sizes, bos_token_id=None, eos_token_id=256)
    return Checkpoint(folder, reference)


@contextlib.asynccontextmanager
async def running(way: str, checkpoint: Checkpoint, device: str, scratch: Path) -> AsyncIterator[str]:
    """Run a stack during a `with` statement and yield its URL."""
    if way == TWO_HOSTS:
        with Cluster(scratch, checkpoint.folder, ONE_HOST, worker_options=[f"--device={device}"]) as cluster:
            names = [cluster.start_worker("prefill", 0, host=0), cluster.start_worker("decode", 0, host=1)]
            cluster.start_gateway()
            cluster.wait_ready(*names)
            await cluster.wait_workers(2)
            yield cluster.url
            await cluster.settled()
        return
    with serve(
        scratch / "log", str(checkpoint.folder), f"--device={device}", *checkpoint.options(way, scratch)
    ) as stack:
        yield stack.url
        await stack.settled()


async def complete_all(url: str, prompts: Sequence[str], tokens: int) -> list[list[int]]:
    """Send all prompts at once and return the greedy tokens after each."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def complete(prompt: str) -> list[int]:
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
            answer.raise_for_status()
            found: Any = answer.json()
            return list(found["choices"][0]["token_ids"])

        return list(await asyncio.gather(*map(complete, prompts)))


async def wrong_prompts(
    way: str, checkpoint: Checkpoint, device: str, prompts: Sequence[str], tokens: int
) -> list[str]:
    """Run a way twice over the prompts, without a cache and then with cached prefixes. Describe each difference."""
    with tempfile.TemporaryDirectory() as scratch:
        async with running(way, checkpoint, device, Path(scratch)) as url:
            found = [await complete_all(url, prompts, tokens) for _ in range(2)]
    return [
        f"{prompt[:20]!r} {'with a cache ' if again else ''}from token {place}"
        for again, answers in enumerate(found)
        for prompt, own in zip(prompts, answers)
        if (place := checkpoint.first_difference(prompt, own)) is not None or len(own) != tokens
    ]


def ways_of(family: str, ways: Sequence[str]) -> list[str]:
    """Return those of `ways` in which a family can run."""
    return [way for way in ways if way != ASSISTANT or family.startswith("gemma4")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stack.families", description=__doc__.partition("\n")[0])
    parser.add_argument("--family", action="append", choices=list(FAMILIES), help="default: all; may be repeated")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="default: all; may be repeated")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu", help="of all workers: cpu or cuda [%(default)s]")
    args = parser.parse_args()
    rows, wrong = [], 0
    for family in args.family or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = write_checkpoint(family, Path(folder))
            for way in ways_of(family, args.way or list(WAYS)):
                found = asyncio.run(wrong_prompts(way, checkpoint, args.device, PROMPTS[: args.prompts], args.tokens))
                wrong += len(found)
                rows.append([family, way, str(args.prompts), str(len(found))])
                print(*rows[-1], *found[:2], sep=" | ", file=sys.stderr, flush=True)
    print(table(["family", "way", "prompts", "differ"], rows))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
