from __future__ import annotations

from pathlib import Path

import pytest

from paceline.services.gateway.media.processors.base import Processor
from paceline.services.gateway.media.processors.families import read_processor
from paceline.services.gateway.tokenizer import Tokenizer
from tests.services.gateway.toy_model import write_toy_media_model


@pytest.fixture(scope="session")
def media_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model that takes media."""
    return write_toy_media_model(tmp_path_factory.mktemp("models") / "media")


@pytest.fixture(scope="session")
def processor(media_model: Path) -> Processor:
    found = read_processor(media_model)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def tokenizer(media_model: Path, processor: Processor) -> Tokenizer:
    return Tokenizer(media_model, media_tokens=processor.tokens)
