"""The longest context of a worker, from its options and its memory."""

from __future__ import annotations

import pytest

from paceline.core.config import WorkerConfig
from paceline.core.errors import ConfigError
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.services.worker.worker_setup import max_model_len

LAYOUT = make_layout((GroupShape("full", (0,), 1, 16, 0),), 2, "model")
BLOCK = LAYOUT.alignment


@pytest.mark.parametrize(
    ("option", "model", "slots", "tokens"),
    [
        (0, 10 * BLOCK, 100, 10 * BLOCK),
        (3, 10 * BLOCK, 1, 3),  # less than a block
        (0, 3, 100, 3),
        (0, 10 * BLOCK, LAYOUT.slots_for(4 * BLOCK), 4 * BLOCK),
    ],
)
def test_a_context_is_as_long_as_memory_allows(option: int, model: int, slots: int, tokens: int) -> None:
    config = WorkerConfig(model="any", max_model_len=option)
    assert max_model_len(config, LAYOUT, model, slots, slots) == tokens


@pytest.mark.parametrize(
    ("option", "slots", "message"),
    [
        (0, 0, "room for one context of 0 tokens, not 1000; raise --kv-memory or lower --max-model-len"),
        (900, 1, f"room for one context of {900 % BLOCK or BLOCK} tokens, not 900"),
        (1001, 100, "--max-model-len 1001 is more than the model's 1000"),
    ],
)
def test_a_context_that_does_not_fit_is_refused(option: int, slots: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        max_model_len(WorkerConfig(model="any", max_model_len=option), LAYOUT, 1000, slots, slots)
