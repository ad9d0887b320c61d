from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.speculative import (
    SpeculativeConfig,
    parse_speculative_config,
    speculative_help,
    with_draft_folder,
)


def test_nothing_is_no_speculation() -> None:
    assert parse_speculative_config("") is None
    assert parse_speculative_config("  ") is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"method": "ngram"}, SpeculativeConfig("ngram")),
        (
            {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
            SpeculativeConfig("ngram", 8, 1, 3),
        ),
        ({"model": "/m", "num_speculative_tokens": 2}, SpeculativeConfig("draft_model", 2, model="/m")),
        (
            {"method": "early_layers", "num_layers": 5, "adaptive": False},
            SpeculativeConfig("early_layers", num_layers=5, adaptive=False),
        ),
    ],
)
def test_fields_have_the_names_of_the_field(values: dict[str, object], expected: SpeculativeConfig) -> None:
    assert parse_speculative_config(json.dumps(values)) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "JSON object"),
        ("{}", "needs a method"),
        ('{"method": "eagle9"}', "ngram, draft_model or early_layers"),
        ('{"method": "ngram", "tokens": 4}', "no field 'tokens'"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "must be of type int"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "from 1 to 16"),
        ('{"method": "ngram", "prompt_lookup_min": 5}', "from 1 to prompt_lookup_max"),
        (
            '{"method": "ngram", "model": "/m"}',
            "model is for method draft_model; ngram has method, num_speculative_tokens, "
            "prompt_lookup_min, prompt_lookup_max, adaptive, rejection_sample_method",
        ),
        (
            '{"model": "/m", "prompt_lookup_max": 3}',
            "prompt_lookup_max is for method ngram; draft_model has .*, model, ",
        ),
        ('{"method": "early_layers", "model": "/m"}', "early_layers has .*, num_layers, "),
        ('{"method": "draft_model"}', "needs model"),
        ('{"method": "early_layers"}', "needs num_layers"),
    ],
)
def test_mistakes_are_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_speculative_config(text)


def test_help_has_a_line_for_each_field() -> None:
    lines = speculative_help().splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [f.name for f in dataclasses.fields(SpeculativeConfig)]
    assert "  prompt_lookup_max: ngram: longest match, in tokens [4]" in lines
    assert "  adaptive: draft fewer tokens, or none, if that is faster [true]" in lines


def test_a_draft_model_becomes_a_folder_and_all_else_stays() -> None:
    text = '{"model": "org/draft", "revision": "v1", "num_speculative_tokens": 2}'
    config = parse_speculative_config(with_draft_folder(text, Path("/cache/draft")))
    assert config == SpeculativeConfig("draft_model", 2, model="/cache/draft")
