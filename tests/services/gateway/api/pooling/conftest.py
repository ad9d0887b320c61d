from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.gateway.conftest import Stack, StartStack
from tests.services.gateway.toy_pooling import PROMPTS, write_toy_encoder


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that embeds, with prompts."""
    return write_toy_encoder(tmp_path_factory.mktemp("models") / "toy", prompts=PROMPTS)


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two labels."""
    return write_toy_encoder(tmp_path_factory.mktemp("models") / "toy", "BertForSequenceClassification", labels=2)


@pytest.fixture
async def embedder(start_stack: StartStack, encoder: Path) -> Stack:
    return await start_stack(prefill=0, decode=0, pool=1, model=str(encoder))


@pytest.fixture
async def labeller(start_stack: StartStack, classifier: Path) -> Stack:
    return await start_stack(prefill=0, decode=0, pool=1, model=str(classifier))
