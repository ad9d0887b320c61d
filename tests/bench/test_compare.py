from argparse import ArgumentTypeError

import pytest

from bench.compare import _system, medians, rows


def test_medians_are_taken_figure_by_figure() -> None:
    rounds = [{"one": {"all": {"ttft": ttft, "tpot": tpot}}} for ttft, tpot in ((1.0, 9.0), (5.0, 7.0), (2.0, 8.0))]
    assert medians(rounds) == {"one": {"all": {"ttft": 2.0, "tpot": 8.0}}}


def test_rows_hold_both_and_their_ratio() -> None:
    a, b = {"one": {"all": {"ttft": 30.0, "failures": 0.0}}}, {"one": {"all": {"ttft": 60.0, "failures": 0.0}}}
    assert rows(a, b) == [["one", "all", "ttft", "30.0", "60.0", "0.50"], ["one", "all", "failures", "0.0", "0.0", "-"]]


def test_systems_are_named_urls() -> None:
    assert _system("ours=http://127.0.0.1:1") == ("ours", "http://127.0.0.1:1")
    for bad in ("ours", "=http://x", "ours=ftp://x"):
        with pytest.raises(ArgumentTypeError, match="NAME=URL"):
            _system(bad)
