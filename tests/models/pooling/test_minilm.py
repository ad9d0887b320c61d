"""The bundled all-MiniLM-L6-v2 gives the vectors of sentence-transformers 6.2 in fp32, for texts in ten languages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from paceline.core.pooling import PoolWish
from paceline.models.pooling.model import TextRow
from tests.models.pooling.tiny_encoders import load

pytestmark = pytest.mark.model

_TABLE = json.loads(Path(__file__).with_name("minilm.json").read_text(encoding="utf-8"))
"""For each text, what sentence-transformers computed: every 64th component of its vector, and the sum of all components
times cos(0), cos(1), ...
"""


def test_vectors_are_those_of_sentence_transformers(real_model: Callable[[str], Path]) -> None:
    folder = real_model("all-minilm-l6-v2")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    rows = [TextRow(tokenizer.encode(each["text"]).ids) for each in _TABLE]
    model = load(folder)
    found = model.run(rows, PoolWish("embed"))
    turns = torch.arange(384.0).cos()
    for each, result in zip(_TABLE, found):
        assert result.values is not None
        vector = result.values[0]
        torch.testing.assert_close(vector[::64], torch.tensor(each["components"]), atol=2e-6, rtol=0)
        assert float((vector * turns).sum()) == pytest.approx(each["sum"], abs=2e-5)
    narrow = load(folder, torch.bfloat16).run(rows, PoolWish("embed"))
    for wide, other in zip(found, narrow):
        torch.testing.assert_close((wide.values * other.values).sum(), torch.tensor(1.0), atol=1e-3, rtol=0)
