from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench.common.rounds import Rounds
from bench.common.systems import System
from bench.common.turns import add_options, report, rows, systems_of, take_turns

FIGURES = ("output_tokens_per_s", "total_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "itl_ms_p50", "itl_ms_p99")
A, B = "a=http://127.0.0.1:1", "b=http://127.0.0.1:2"


def rounds(a: list[float], b: list[float], figure: str = "ttft_ms_p50") -> Rounds:
    return {name: [{"one": {"all": {figure: value}}} for value in values] for name, values in (("a", a), ("b", b))}


def parse(*arguments: str) -> tuple[list[System], argparse.Namespace]:
    parser = argparse.ArgumentParser()
    add_options(parser)
    args = parser.parse_args(arguments)
    return systems_of(parser, args), args


def test_systems_take_turns() -> None:
    turns: list[tuple[str, int]] = []

    def measure(system: System, number: int) -> dict[str, dict[str, dict[str, float]]]:
        turns.append((system.name, number))
        return {"one": {"all": {"number": float(number)}}}

    found = take_turns([System("a", ""), System("b", "")], 2, 1.0, measure)
    assert turns == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [one["one"]["all"]["number"] for one in found["b"]] == [0, 1]


def test_rows_hold_medians_with_their_spread_and_a_ratio() -> None:
    (row,) = rows(rounds([30, 10, 20], [40, 44, 38]))
    assert row == ["one", "all", "ttft_ms_p50", "20.0 (10.0–30.0)", "40.0 (38.0–44.0)", "0.50"]
    (row,) = rows(rounds([3], [0], "failures"))
    assert row == ["one", "all", "failures", "3.0", "0.0", "-"]


def test_systems_are_named_urls_and_those_with_a_command_are_started() -> None:
    systems, _ = parse(A, B, "--start", "b=serve 'my model' --port=2")
    assert systems == [
        System("a", "http://127.0.0.1:1"),
        System("b", "http://127.0.0.1:2", ("serve", "my model", "--port=2")),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", B], "NAME="),
        (["=http://x", B], "NAME="),
        (["a=ftp://x", B], "NAME=URL"),
        ([A, A], "different names"),
        ([A, B, "--rounds=0"], "at least one round"),
        ([A, B, "--start", "c=serve"], "neither of the systems"),
    ],
)
def test_what_does_not_fit_is_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert message in capsys.readouterr().err


def test_a_report_is_a_table_a_file_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "a.json", tmp_path / "a.svg"
    _, args = parse(A, B, "--start=a=serve", f"--out={out}", f"--picture={picture}")
    found = {
        name: [{"one": {"all": dict.fromkeys(FIGURES, value)}, "copy": {"all": dict.fromkeys(FIGURES, 2.0)}}]
        for name, value in (("a", 17.0), ("b", 23.0))
    }
    assert report(args, 5, found) == 0
    assert "| 17.0 | 23.0 | 0.74  |" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert written["rounds"] == found
    assert written["systems"]["a"] == {"url": "http://127.0.0.1:1", "command": "serve"}
    drawn = picture.read_text()
    assert all(f">{text}<" in drawn for text in ("one", "copy", "a", "b", " 17.0", " 23.0"))


def test_failed_requests_are_told_by_the_status() -> None:
    _, args = parse(A, B)
    assert report(args, 5, rounds([0, 0], [0, 1], "failures")) == 1
    assert report(args, 5, rounds([0, 0], [0, 0], "failures")) == 0
