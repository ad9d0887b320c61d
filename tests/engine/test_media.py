"""Prompts with images on tiny models: tokens are those of `transformers`, however a prompt is cut, cached or moved."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from paceline.core.media import MediaKind
from paceline.core.types import SamplingParams
from tests.engine.loops import Loop, load
from tests.engine.media_host import MAX_TOKENS, MediaHost
from tests.engine.media_models import KINDS, MediaModel, Prompt, media_model
from tests.tiny_checkpoints import write_tiny

GREEDY = SamplingParams(max_tokens=64)
IMAGE, FRAME = MediaKind.IMAGE, MediaKind.VIDEO_FRAME


RARE = ("unified", "qwen3_vl_moe")
"""Kinds that differ from the others in their encoders or experts alone, which have tests of their own."""
MODELS = [pytest.param(kind, marks=pytest.mark.thorough) if kind in RARE else kind for kind in KINDS]


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MediaModel:
    return media_model(request.param, tmp_path_factory.mktemp(request.param))


def prompts(made: MediaModel) -> list[Prompt]:
    """Return prompts whose spans are longer than a step and than a window, or short, and at both ends of a prompt."""
    generator = torch.Generator().manual_seed(3)
    other = IMAGE if made.kind in ("gemma3", "llava") else FRAME

    def rows(count: int) -> torch.Tensor:
        return torch.randn(count, made.row_size, generator=generator)

    tower = made.tower_rows(0)
    return [
        made.prompt(21, (IMAGE, tower), 9, seed=1),
        made.prompt(5, (IMAGE, rows(40)), 2, (other, rows(7)), 1, (other, rows(17)), 30, seed=2),
        made.prompt((IMAGE, rows(3)), 50, (IMAGE, rows(35)), seed=3),
    ]


def check_all(made: MediaModel, asked: list[Prompt], outputs: list[list[int]]) -> None:
    for prompt, output in zip(asked, outputs, strict=True):
        assert len(output) == GREEDY.max_tokens
        made.check(prompt, output)


@pytest.mark.parametrize(
    ("drafter", "on_device"),
    [
        ("none", None),
        ("lookup", 1.5),
        *(
            pytest.param(*rare, marks=pytest.mark.thorough)
            for rare in (("none", 1.5), ("lookup", None), ("model", None), ("model", 1.5))
        ),
    ],
)
def test_tokens_are_those_of_transformers(made: MediaModel, drafter: str, on_device: float | None) -> None:
    check_drafts(made, drafter, on_device)


# A model that runs in transformers cannot stop after some layers.
@pytest.mark.parametrize("made", [kind for kind in MODELS if kind != "llava"], indirect=True)
@pytest.mark.parametrize("on_device", [pytest.param(None, marks=pytest.mark.thorough), 1.5])
def test_drafts_of_early_layers_leave_the_tokens_as_they_are(made: MediaModel, on_device: float | None) -> None:
    check_drafts(made, "early", on_device)


def check_drafts(made: MediaModel, drafter: str, on_device: float | None) -> None:
    draft_model = made.model if drafter == "model" else None
    loop = Loop(made.model, 2, drafter, draft_model, contexts_on_device=on_device)
    asked = prompts(made)
    outputs = loop.run([(prompt.token_ids, GREEDY) for prompt in asked], [prompt.media for prompt in asked])
    loop.engine.stop()
    check_all(made, asked, [[token.id for token in output] for output in outputs])
    assert (loop.engine.stats.accepted_tokens > 0) == (drafter != "none")


@pytest.mark.parametrize("budget", [8, pytest.param(32, marks=pytest.mark.thorough), 500])
def test_tokens_do_not_depend_on_chunks(made: MediaModel, budget: int) -> None:
    host, asked = MediaHost(made.model, budget), prompts(made)
    check_all(made, asked, host.run(asked))
    spans = {chunk.length for chunk in host.chunks if not chunk.follows}
    longest = max(span.length for prompt in asked for span, _ in prompt.media)
    assert (max(spans) > budget) == (budget < longest and bool(made.model.config.whole_media))


def test_a_reused_prefix_may_end_inside_a_span(made: MediaModel) -> None:
    host = MediaHost(made.model, 500)
    rows = torch.randn(45, made.row_size, generator=torch.Generator().manual_seed(4))
    prompt = made.prompt(29, (IMAGE, rows), 40, seed=4)
    whole = host.run([prompt])
    check_all(made, [prompt], whole)
    host.reused.clear()
    for most in range(16, len(prompt.token_ids), 16):
        assert host.run([prompt], most_reused=most) == whole
    assert any(29 < reused < 29 + 45 for reused in host.reused)
    # With another image, not even the first tokens of the span are reused.
    other = prompt.with_other_images()
    host.reused.clear()
    check_all(made, [other], host.run([other], most_reused=len(prompt.token_ids)))
    assert host.reused[0] <= 29


def test_a_preempted_request_computes_its_span_again_or_reuses_it(made: MediaModel) -> None:
    for most_reused in (0, MAX_TOKENS):
        host, asked = MediaHost(made.model, 24, contexts=1.2), prompts(made)
        check_all(made, asked, host.run(asked, most_reused))
        assert host.preempted


def test_a_draft_model_of_another_size_reads_no_encodings(made: MediaModel, tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama", vocab_size=made.model.config.vocab_size)
    loop, asked = Loop(made.model, 2, "model", load(tmp_path)), prompts(made)
    outputs = loop.run([(prompt.token_ids, GREEDY) for prompt in asked], [prompt.media for prompt in asked])
    loop.engine.stop()
    check_all(made, asked, [[token.id for token in output] for output in outputs])
    assert loop.engine.stats.draft_tokens > 0


def test_a_worker_decodes_what_another_one_has_computed(made: MediaModel) -> None:
    host, asked = MediaHost(made.model, 32), prompts(made)
    check_all(made, asked, host.run(asked, hands_over=True))


def test_a_recorded_step_gives_the_same_tokens_over_the_same_memory(made: MediaModel) -> None:
    host = MediaHost(made.model, 24)
    host.run(prompts(made))
    assert host.memory is not None
    runner = host.runner(host.memory)
    for step, result in zip(host.steps, host.results, strict=True):
        found = runner.execute(pickle.loads(step))
        assert [own.tokens for own in found.chunks] == [own.tokens for own in result.chunks]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow ", "ignore:invalid value ", "ignore:divide by zero ")
@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        ("experts", "reference"),
        *(
            pytest.param(kind, "triton-invariant", marks=pytest.mark.thorough)
            for kind in ("edge", "experts", "qwen3_vl")
        ),
    ],
)
def test_other_kernels_read_encodings_too(tmp_path: Path, kind: str, kernels: str) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    made = media_model(kind, tmp_path, kernels)
    rows = torch.randn(20, made.row_size, generator=torch.Generator().manual_seed(5))
    asked = [made.prompt(3, (IMAGE, rows), 2, (FRAME, rows[:4]), 2, seed=5)]
    # Some steps are small enough to be recorded. With "edge" and "qwen3_vl", rows of encodings are among them.
    host = MediaHost(made.model, 24, max_tokens=3)
    for prompt, output in zip(asked, host.run(asked)):
        made.check(prompt, output)


def test_a_model_with_states_reads_images(tmp_path: Path) -> None:
    """Qwen 3.5 has positions with three dimensions in a few layers, and states in the others."""
    made = media_model("qwen3_5", tmp_path)
    asked = prompts(made)
    for budget, hands_over in ((8, False), (500, True)):
        check_all(made, asked, MediaHost(made.model, budget).run(asked, hands_over=hands_over))
