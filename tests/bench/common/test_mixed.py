from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.common.mixed import Outcome, requests
from bench.serving.equality import shorten, ways
from paceline.core.speculative import parse_speculative_config
from paceline.models.config import read_config


def test_requests_are_of_all_kinds_and_come_from_the_seed() -> None:
    asked = requests(200, 1, 1000)
    assert asked == requests(200, 1, 1000) != requests(200, 2, 1000)
    said = {name for request in asked for name in request.body}
    assert said >= {"logprobs", "seed", "stop", "logit_bias", "structured_outputs", "repetition_penalty", "min_tokens"}
    assert {request.body["temperature"] for request in asked} >= {0, 0.8, 1.4}
    assert 5 < sum(request.leaves_after is not None for request in asked) < 40


def test_what_differs_is_told() -> None:
    one = Outcome([1, 2, 3], "abc", [], "stop")
    assert one.difference(Outcome([1, 2, 3], "abc", [], "stop")) == ""
    assert one.difference(Outcome([1, 2, 4], "abc", [], "stop"))
    assert one.difference(Outcome([1, 2, 3], "abd", [], "stop"))
    assert one.difference(Outcome([1, 2, 3], "abc", [], "length"))
    assert one.difference(Outcome([1, 2, 3], "abc", [], None))


def test_of_a_client_that_goes_away_counts_what_both_have_received() -> None:
    assert Outcome([1, 2], "ab").difference(Outcome([1, 2, 3], "abc")) == ""
    assert Outcome([1, 2], "ab").difference(Outcome([1, 4, 3], "axc"))


def test_a_shortened_checkpoint_is_a_model(tmp_path: Path, save_gemma3: Any) -> None:
    save_gemma3()
    shorten(tmp_path, 3, tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 3
    assert read_config(tmp_path / "draft").num_layers == 3


def test_every_way_is_a_command_line_that_is_understood(tmp_path: Path) -> None:
    stacks = ways(tmp_path, 4)
    assert len(stacks) == 8
    for options in stacks.values():
        parse_speculative_config(options[1].partition("=")[2])
