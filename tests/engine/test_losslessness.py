"""Speculation keeps the distribution of sampled tokens: chi-square tests of whole outputs against the exact one.

Every test of a rule has twins with a broken rule, which must not pass it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.context import Context
from paceline.core.kv_layout import make_layout
from paceline.core.types import Key, SamplingParams, Token
from paceline.engine import row_sampler, sampler
from paceline.engine.distribution import TokenDistribution
from paceline.engine.drafter import Drafter, ModelDrafter, PromptLookup
from paceline.engine.limits import Limits
from paceline.engine.request import Request
from paceline.engine.runner import ModelRunner, layer_caches
from paceline.engine.sampler import Draft, Purpose, SamplingRow
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculation import Speculation
from paceline.engine.step import Sampled
from paceline.kernels import select_kernels
from paceline.kernels.choosing import TokenChooser
from paceline.models.base import Model
from paceline.models.loader import load_model
from tests.engine.loops import NO_GRAMMARS

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
VOCAB = 4
PROMPT = [1, 3, 0, 1, 3, 0, 1]
TOKENS = 4
"""Tokens of each output. The first is sampled with the prompt; up to two of the others are drafted in a step."""
REQUESTS = 12_500
AT_A_TIME = 250
DRAFTS = 2
SURE = 1e-9
"""A result with a smaller probability than this is not chance."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model, Any]:
    """A model, another model with the same vocabulary and other probabilities, and the reference of the first one."""
    import transformers

    loaded, references = [], []
    for seed, layers in ((1, 3), (2, 1)):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.35,
        )
        reference = transformers.LlamaForCausalLM(config)
        folder = tmp_path_factory.mktemp("model")
        reference.save_pretrained(folder)
        references.append(reference)
        loaded.append(load_model(Path(folder), torch.float32, select_kernels(CPU, "native"), CPU))
    return loaded[0], loaded[1], references[0]


def exact(reference: Any, params: SamplingParams) -> Tensor:
    """Return the probability of every output, fp64 [VOCAB ** TOKENS], in the order of the outputs' tokens."""
    outputs = torch.tensor(list(product(range(VOCAB), repeat=TOKENS)))
    contexts = torch.cat((torch.tensor(PROMPT).expand(len(outputs), -1), outputs), dim=1)
    with torch.inference_mode():
        logits = reference(contexts[:, :-1]).logits[:, len(PROMPT) - 1 :].double()
    shares = torch.log_softmax(logits / params.temperature, dim=-1)
    return shares.gather(2, outputs.unsqueeze(2)).sum(dim=(1, 2)).exp()


def counts(
    model: Model,
    draft_model: Model,
    drafter: str,
    probabilistic: bool,
    params: SamplingParams,
    chooser: TokenChooser | None = None,
) -> Tensor:
    """Run REQUESTS requests with different seeds. Return how often each output came, fp64 [VOCAB ** TOKENS]."""
    shapes, layers = model.group_shapes, model.config.num_layers
    shapes += tuple(replace(shape, name="draft", layers=(layers,)) for shape in draft_model.group_shapes)
    layout = make_layout(shapes, 4, "test")
    blocks = [group.blocks_for(len(PROMPT) + TOKENS) for group in layout.groups]
    pool = torch.zeros(AT_A_TIME * sum(blocks) * layout.slot_bytes // 4)
    caches = layer_caches(layout, pool)
    drafters: dict[str, Drafter] = {
        "lookup": PromptLookup(1, 2),
        "early": ModelDrafter(model, caches, probabilistic, layers=1, chooser=chooser),
        "model": ModelDrafter(draft_model, caches[layers:], probabilistic, len(model.group_shapes), chooser=chooser),
    }
    limits = Limits(AT_A_TIME * len(PROMPT), 64, AT_A_TIME, DRAFTS)
    worker = ModelRunner(model, layout, pool, limits, NO_GRAMMARS, drafters[drafter], probabilistic, chooser)
    found = torch.zeros(VOCAB**TOKENS, dtype=torch.float64)
    for first in range(0, REQUESTS, AT_A_TIME):
        scheduler = Scheduler(limits, Speculation(DRAFTS, adaptive=False))
        slots = iter(range(AT_A_TIME * sum(blocks)))
        for seed in range(first, first + AT_A_TIME):
            tables = [[next(slots) for _ in range(count)] for count in blocks]
            sampling = replace(params, seed=seed)
            key = Key(str(seed), 1, 1)
            scheduler.add(Request(key, Context(PROMPT), len(PROMPT), sampling, layout, tables))
        outputs: dict[Key, int] = {}
        while (step := scheduler.plan()) is not None:
            scheduler.apply(step, worker.execute(step))
            for event in scheduler.take_events():
                if isinstance(event, Sampled):
                    outputs[event.key] = outputs.get(event.key, 0) * VOCAB + event.token.id
        found += torch.bincount(torch.tensor(list(outputs.values())), minlength=VOCAB**TOKENS)
        assert scheduler.stats.draft_tokens > 0
    return found


def chance(found: Tensor, expected: Tensor) -> float:
    """Return the probability that counts deviate at least this much from `expected` (chi-square test).

    Rare outputs are counted as one.
    """
    wanted = expected / expected.sum() * found.sum()
    rare = wanted < 8
    if rare.any():
        found = torch.cat((found[~rare], found[rare].sum().reshape(1)))
        wanted = torch.cat((wanted[~rare], wanted[rare].sum().reshape(1)))
    statistic = ((found - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(found) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


WAYS = [
    ("model", True),
    ("early", False),
    *(
        pytest.param(*way, marks=pytest.mark.thorough)
        for way in (("lookup", True), ("lookup", False), ("model", False), ("early", True))
    ),
]
HOT = SamplingParams(temperature=1.1, max_tokens=TOKENS)


@pytest.mark.parametrize(("drafter", "probabilistic"), WAYS)
def test_outputs_with_speculation_have_the_distribution_of_the_model(
    models: tuple[Model, Model, Any], drafter: str, probabilistic: bool
) -> None:
    model, draft_model, reference = models
    assert REQUESTS * TOKENS >= 50_000
    found = counts(model, draft_model, drafter, probabilistic, HOT, select_kernels(CPU, "native").chooser)
    assert chance(found, exact(reference, HOT)) > 1e-3


# ---- rules that are broken on purpose


def accepts_everything(self: TokenDistribution, draft: int, *_: object) -> int:
    return draft


def draws_anew_from_all(
    self: TokenDistribution, draft: int, drawn_from: TokenDistribution | None, size: int, u: float, v: float
) -> int:
    found = VERIFY(self, draft, drawn_from, size, u, v)
    return draft if found == draft else self.draw(v)


def accepts_by_its_own_probability(
    self: TokenDistribution, draft: int, drawn_from: TokenDistribution | None, size: int, u: float, v: float
) -> int:
    return draft if u < self.dense(size)[draft] else VERIFY(self, draft, drawn_from, size, 1.0, v)


VERIFY = TokenDistribution.verify


@pytest.mark.parametrize(
    ("drafter", "broken"),
    [
        ("model", accepts_everything),
        ("lookup", draws_anew_from_all),
        ("model", accepts_by_its_own_probability),
        *(
            pytest.param(drafter, broken, marks=pytest.mark.thorough)
            for drafter, broken in (
                ("lookup", accepts_everything),
                ("early", accepts_everything),
                ("early", draws_anew_from_all),
                ("model", draws_anew_from_all),
            )
        ),
    ],
)
def test_a_broken_rule_is_noticed(
    models: tuple[Model, Model, Any], monkeypatch: pytest.MonkeyPatch, drafter: str, broken: Callable[..., int]
) -> None:
    model, draft_model, reference = models
    monkeypatch.setattr(TokenDistribution, "verify", broken)
    monkeypatch.setitem(globals(), "REQUESTS", 3000)
    assert chance(counts(model, draft_model, drafter, True, HOT), exact(reference, HOT)) < SURE


def test_one_number_for_drawing_and_accepting_is_noticed(
    models: tuple[Model, Model, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft_model, reference = models
    monkeypatch.setattr(
        sampler, "_uniform_of", lambda row, purpose: sampler.uniform(row.params.seed, len(row.token_ids))
    )
    monkeypatch.setitem(globals(), "REQUESTS", 3000)
    assert chance(counts(model, draft_model, "model", True, HOT), exact(reference, HOT)) < SURE


@pytest.mark.parametrize(
    "drafter", ["early", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("lookup", "model"))]
)
def test_a_strict_rule_that_takes_drafts_is_noticed(
    models: tuple[Model, Model, Any], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    model, draft_model, reference = models
    drafts: list[Draft] = []

    def remember(rows: row_sampler.Rows, row: int) -> list[Draft]:
        drafts[:] = DRAFTS_OF(rows, row)
        return [*drafts]

    def sample(logits: Tensor, row: SamplingRow, draft: Draft | None, chooser: None) -> Token:
        return Token(drafts.pop(0).token) if drafts and row.params.seed % 2 else sampler.sample(logits, row, draft)

    monkeypatch.setattr(row_sampler.Rows, "drafts_of", remember)
    monkeypatch.setattr(row_sampler, "sample", sample)
    monkeypatch.setitem(globals(), "REQUESTS", 3000)
    assert chance(counts(model, draft_model, drafter, False, HOT), exact(reference, HOT)) < SURE


DRAFTS_OF = row_sampler.Rows.drafts_of


# ---- the tail of the distribution

TAIL_TOKENS = 64
TAIL = 2.0**-30
"""Probability of all tail tokens together. The draws below use the upper 2 ** -29, so half of them hit the tail."""


def tail_logits() -> Tensor:
    logits = torch.full((TAIL_TOKENS + 1,), 0.0, dtype=torch.float32)
    logits[0] = torch.tensor((1 - TAIL) / (TAIL / TAIL_TOKENS), dtype=torch.float64).log().float()
    return logits


def tail_draws(draft: Draft | None) -> Iterator[int]:
    row = SamplingRow(SamplingParams(temperature=1.0), [0], 1)
    for seed in range(4000):
        yield sampler.sample(tail_logits(), replace(row, params=replace(row.params, seed=seed)), draft).id


@pytest.fixture
def uppermost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw random numbers that choose or accept a token from the upper 2 ** -29 of their interval."""
    whole = sampler.uniform

    def upper(seed: int, position: int, purpose: Purpose = Purpose.TOKEN) -> float:
        u = whole(seed, position, purpose)
        return u if purpose is Purpose.REDRAW else 1.0 - 2.0**-29 * (1.0 - u)

    monkeypatch.setattr(sampler, "uniform", upper)


CERTAIN = TokenDistribution(torch.tensor([1.0] + [0.0] * TAIL_TOKENS, dtype=torch.float64))


@pytest.mark.parametrize("draft", [None, Draft(0), Draft(0, CERTAIN)])
def test_the_tail_is_drawn_as_often_as_it_should(uppermost: None, draft: Draft | None) -> None:
    drawn = [token for token in tail_draws(draft) if token != 0]
    assert 1800 < len(drawn) < 2200  # half of the 4000 draws are expected
    found = torch.bincount(torch.tensor(drawn) - 1, minlength=TAIL_TOKENS).double()
    assert chance(found, torch.ones(TAIL_TOKENS, dtype=torch.float64)) > 1e-3


@pytest.mark.parametrize("draft", [None, Draft(0)])
def test_a_tail_in_single_precision_is_noticed(
    uppermost: None, monkeypatch: pytest.MonkeyPatch, draft: Draft | None
) -> None:
    exactly = sampler.cut
    monkeypatch.setattr(sampler, "cut", lambda *row: TokenDistribution(exactly(*row).weights.float()))
    drawn = [token for token in tail_draws(draft) if token != 0]
    assert not 1800 < len(drawn) < 2200
