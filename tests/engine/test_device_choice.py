"""A runner whose device chooses tokens gives the tokens that the host would choose."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bench.gpu.random_model import RandomWeights, llama_config, load_random
from paceline.core.context import Context
from paceline.core.speculative import SpeculativeConfig
from paceline.core.types import Key, SamplingParams, Token
from paceline.engine.limits import Limits
from paceline.engine.loading import Loaded
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculation import Speculation
from paceline.engine.step import Sampled
from paceline.kernels import select_kernels
from paceline.kernels.choosing import Draw, TokenChooser

pytest.importorskip("triton", reason="the package triton is not installed")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = llama_config(hidden=32, inner=48, layers=2, heads=4, kv_heads=2, vocab=64)
PROMPTS = [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1], [9, 10, 11, 12, 13, 14, 15, 8, 9], [20, 21, 22, 23, 16]]
LENGTH = 14


class Counting:
    """The kernels' chooser, which also counts the rows of each call."""

    def __init__(self, chooser: TokenChooser) -> None:
        self._chooser = chooser
        self.accept = chooser.accept
        self.rows: list[int] = []

    def choose(self, logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> torch.Tensor:
        self.rows.append(len(draws))
        return self._chooser.choose(logits, rows, draws)


def tokens_of(loaded: Loaded, rows: Sequence[SamplingParams]) -> dict[str, list[Token]]:
    layout = loaded.layout
    blocks = [group.blocks_for(64) for group in layout.groups]
    pool = torch.zeros(len(rows) * sum(blocks) * layout.slot_bytes // 4, device=DEVICE)
    limits = Limits(12, 64, 4, loaded.max_drafts)
    runner, scheduler = loaded.runner(pool, limits), Scheduler(limits, Speculation(loaded.max_drafts, adaptive=False))
    slots = iter(range(len(rows) * sum(blocks)))
    for index, (prompt, params) in enumerate(zip(PROMPTS, rows)):
        tables = [[next(slots) for _ in range(count)] for count in blocks]
        scheduler.add(Request(Key(str(index), 1, 1), Context(prompt), len(prompt), params, layout, tables))
    outputs: dict[str, list[Token]] = {}
    while (step := scheduler.plan()) is not None:
        scheduler.apply(step, runner.execute(step))
        for event in scheduler.take_events():
            if isinstance(event, Sampled):
                outputs.setdefault(event.key.request_id, []).append(event.token)
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("none", "strict"),
        *((method, rule) for method in ("ngram", "early_layers") for rule in ("strict", "probabilistic")),
    ],
)
def test_tokens_are_those_of_the_host(method: str, rule: str) -> None:
    drafts = None
    if method != "none":
        drafts = SpeculativeConfig(method, 3, num_layers=1, adaptive=False, rejection_sample_method=rule)  # type: ignore[arg-type]
    weights = RandomWeights(CONFIG, torch.float32, DEVICE, signal=3.0)
    host = load_random(weights, select_kernels(DEVICE, "reference"), drafts)
    assert host.chooser is None
    chooser = select_kernels(DEVICE, "triton").chooser
    assert chooser is not None
    counting = Counting(chooser)
    device = Loaded(host.model, None, host.layout, drafts, host.grammars, "", counting)
    rows = [
        SamplingParams(max_tokens=LENGTH),
        SamplingParams(
            max_tokens=LENGTH, temperature=1.5, top_k=9, seed=3, stop_token_ids=frozenset({63}), min_tokens=4
        ),
        SamplingParams(max_tokens=LENGTH, temperature=0.7, seed=4, logprobs=2),
    ]
    expected = tokens_of(host, rows)
    assert tokens_of(device, rows) == expected
    assert {len(tokens) for tokens in expected.values()} <= {*range(4, LENGTH + 1)}
    # Rows with logprobs were left to the host, and drafts were verified together.
    assert max(counting.rows) > (2 if drafts is not None and rule == "strict" else 1)
    assert min(counting.rows) >= 1
