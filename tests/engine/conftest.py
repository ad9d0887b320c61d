from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.engine.constraint import Grammars
from paceline.models.base import Model
from tests.engine.constrained_loop import Answer, Ask, ConstrainedLoop
from tests.engine.loops import load
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.tiny_checkpoints import SaveTiny


@pytest.fixture(params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    request.getfixturevalue(f"save_{request.param}")()
    return load(tmp_path)


@pytest.fixture
def grammars(tmp_path: Path) -> Grammars:
    return Grammars(write_toy_model(tmp_path / "toy"))


@pytest.fixture
def byte_model(save_llama: SaveTiny, tmp_path: Path) -> Model:
    """A model with the vocabulary of the toy tokenizer."""
    save_llama(vocab_size=VOCAB_SIZE)
    return load(tmp_path)


@pytest.fixture
def answer(byte_model: Model, grammars: Grammars) -> Callable[..., list[Answer]]:
    """A function that answers requests, with two steps in flight and drafts."""

    def run(*asks: Ask) -> list[Answer]:
        loop = ConstrainedLoop(byte_model, grammars)
        answers = loop.answer(asks)
        loop.engine.stop()
        return answers

    return run
