"""The stacks that tests share. Each runs a real model with other processes and other step sizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.serving.equality import shorten

SMOLLM = "smollm2-135m-instruct"
GEMMA = "gemma-3-270m"

# SmolLM2's template does not show how it marks reasoning.
THINK = "--reasoning-parser=think"
TWO_WORKERS = (
    THINK,
    "--prefill=2",
    "--decode=2",
    "--threads=1",
    "--max-batched-tokens=32",
    "--max-seqs=32",
    "--local-prefill-tokens=64",
    "--kv-memory=1GiB",
)
# Each pool has room for two or three contexts. The arena has room for little more than the leased blocks.
POOLS = (THINK, "--kv-pool=device", "--kv-pool-memory=12MiB", "--kv-memory=96MiB")
_DRAFT_LAYERS = 8


@dataclass(frozen=True)
class Way:
    """A model and the options with which a stack runs it."""

    model: str
    fixed: tuple[str, ...] = ()
    drafts: dict[str, Any] | None = None
    draft_model: bool = False
    """Whether a draft model proposes tokens. It is a checkpoint of the model's own first layers."""
    disk: bool = False

    def options(self, model: Path, scratch: Path) -> tuple[str, ...]:
        """Return the options for `paceline serve`. The draft model and the disk tier's file go to `scratch`."""
        drafts = self.drafts
        if self.draft_model:
            shorten(model, _DRAFT_LAYERS, scratch / "draft")
            drafts = {"model": str(scratch / "draft"), "num_speculative_tokens": 3, "adaptive": False}
        speculation = (f"--speculative-config={json.dumps(drafts)}",) if drafts else ()
        disk = ("--kv-disk-size=512MiB", f"--kv-disk-dir={scratch}") if self.disk else ()
        return (*self.fixed, *speculation, *disk)


NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "adaptive": False}
ADAPTIVE_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
EARLY_LAYERS = {"method": "early_layers", "num_layers": _DRAFT_LAYERS, "num_speculative_tokens": 3, "adaptive": False}

STACKS: dict[str, Way] = {
    "default": Way(SMOLLM, ("--kv-memory=512MiB", "--log-level=info", "--log-format=json")),
    "two workers": Way(SMOLLM, TWO_WORKERS, draft_model=True),
    "aggregated": Way(SMOLLM, (THINK, "--prefill=0", "--no-async-scheduling", "--kv-memory=24MiB"), NGRAM, disk=True),
    "pools": Way(SMOLLM, POOLS, EARLY_LAYERS, disk=True),
    "float32": Way(SMOLLM, ("--dtype=float32", "--kv-memory=512MiB"), NGRAM),
    "gemma": Way(GEMMA, TWO_WORKERS),
    "gemma pools": Way(GEMMA, POOLS, ADAPTIVE_NGRAM),
    "gemma float32": Way(GEMMA, ("--dtype=float32", "--prefill=0", "--kv-memory=1GiB")),
}
"""Stacks by name. All stacks of a model must give the same outcomes as its first one."""


def on(*names: str, thorough: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Return a mark that runs a test on each of these shared stacks; on those in `thorough` only if asked for."""
    rare = [pytest.param(name, marks=pytest.mark.thorough) for name in thorough]
    return pytest.mark.parametrize("way", [*names, *rare], indirect=True, scope="session")


def way_of(node_id: str) -> str:
    """Return the name of the shared stack that a test runs on; empty if it has none."""
    name = node_id.rpartition("[")[2].removesuffix("]").rpartition("-")[2]
    return name if name in STACKS and node_id.startswith("tests/stack/") else ""
