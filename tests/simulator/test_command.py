"""`paceline simulate` as a person uses it: what it prints, and which options it refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.step_times import Curve, TurnTimes
from paceline.simulator.command import simulate_fleet
from paceline.simulator.options import add_options
from tests.simulator.tiny import profile, step_times, worker_times

SLOW_PROMPTS = worker_times(step_times(prefill=Curve(points=((0, 0.0), (1000, 10.0)))))


def run(folder: Path, *options: str, rate: float = 1.0, group: str = "", **fields: object) -> int:
    """Run the command with a small load, and a fleet whose decode workers compute prompts slowly."""
    load = {"seconds": 20, "arrivals": {"rate": rate}, "requests": [{"class": group, "prompt": 100, "answer": 10}]}
    (folder / "load.json").write_text(json.dumps(load))
    (folder / "profile.json").write_text(profile(decode=SLOW_PROMPTS, **fields).to_json())
    parser = argparse.ArgumentParser()
    add_options(parser)
    files = "--profile", str(folder / "profile.json"), "--load", str(folder / "load.json")
    return simulate_fleet(vars(parser.parse_args([*files, *options])))


def test_a_search_keeps_its_fleet_if_no_aggregated_one_meets_the_objectives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--find", "--ttft", "0.5") == 0
    printed = capsys.readouterr().out
    assert "1 prefill and 1 decode workers" in printed
    assert "Disaggregation pays for this load: workers that do both miss the objectives, however many." in printed


def test_cache_sizes_and_failures_are_answered_in_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = str(tmp_path / "page.html")
    run(tmp_path, "--cache-tokens", "4000,64_000", "--fail", "0.5@10", "--no-restart", "--decode", "2", "--html", page)
    printed = capsys.readouterr().out
    assert "4,000 tokens of cache on each host are enough" in printed
    assert "50% of the workers fail at 10 s." in printed
    assert "64,000 tokens of cache on each host" in Path(page).read_text()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--requests", "-1"], "--requests must be"),
        (["--cache-tokens", "-5"], "--cache-tokens must be"),
        (["--queue-seconds", "-1"], "--queue-seconds must be"),
        (["--no-restart"], "add --fail"),
        (["--ttft", "nan"], "must be above 0 seconds"),
        (["--max-waiting", "0"], "--max-waiting must be"),
        (["--budget", "5"], "add --planner"),
        (["--find", "--planner"], "leave out --find or --planner"),
        (["--find", "--ttft", "0.01"], "2 prefill and 2 decode workers miss the objectives"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(tmp_path, *options)


def test_lines_of_batches_have_no_objectives(tmp_path: Path) -> None:
    assert run(tmp_path, "--ttft", "0.001", "--no-compare", group="background") == 0
    assert run(tmp_path, "--ttft", "0.001", "--no-compare") == 1


def test_a_load_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="describes no request"):
        run(tmp_path, rate=1e-9)


def test_workers_that_share_cores_need_no_number_of_workers_on_a_host(tmp_path: Path) -> None:
    assert run(tmp_path, turns=TurnTimes()) == 0
    with pytest.raises(ConfigError, match="leave it out"):
        run(tmp_path, "--per-host", "4", turns=TurnTimes())
