"""Prompts with images on tiny models: tokens are those of `transformers`, however a prompt is cut, cached or moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.media import MediaKind
from paceline.core.types import SamplingParams
from tests.engine.loops import Loop
from tests.engine.media_models import KINDS, MediaModel, Prompt, media_model

GREEDY = SamplingParams(max_tokens=64)
IMAGE, FRAME = MediaKind.IMAGE, MediaKind.VIDEO_FRAME


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MediaModel:
    return media_model(request.param, tmp_path_factory.mktemp(request.param))


def prompts(made: MediaModel) -> list[Prompt]:
    """Return prompts whose spans are longer than a step and than a window, or shorter, at both ends and side by side."""
    generator = torch.Generator().manual_seed(3)
    other = IMAGE if made.kind == "gemma3" else FRAME

    def rows(count: int) -> torch.Tensor:
        return torch.randn(count, made.model.config.hidden_size, generator=generator)

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


@pytest.mark.parametrize("drafter", ["none", "lookup", "early", "model"])
@pytest.mark.parametrize("on_device", [None, 1.5])
def test_tokens_are_those_of_transformers(made: MediaModel, drafter: str, on_device: float | None) -> None:
    draft_model = made.model if drafter == "model" else None
    loop = Loop(made.model, 2, drafter, draft_model, contexts_on_device=on_device)
    asked = prompts(made)
    outputs = loop.run([(prompt.token_ids, GREEDY) for prompt in asked], [prompt.media for prompt in asked])
    loop.engine.stop()
    check_all(made, asked, [[token.id for token in output] for output in outputs])
    assert (loop.engine.stats.accepted_tokens > 0) == (drafter != "none")
