"""The report of a simulation in a real browser."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from paceline.simulator.report import render
from paceline.simulator.report.content import (
    ReportPercentiles,
    ReportSeries,
    ShownClass,
    ShownDecision,
    ShownSimulation,
    SimulationReport,
)
from tests.stack.browser import browser, is_installed
from tests.stack.page_checks import CONTRASTS, UNNAMED

LINE = "hold: </script><b>TTFT p99 is 4.1 s</b>"


def simulation(name: str) -> ShownSimulation:
    times = ReportPercentiles(p50=0.2, p90=0.5, p95=0.8, p99=1.9)
    chats = ShownClass(requests=900, finished=900, ttft=times, itl=times, total=times, within=0.97, goodput=1.5)
    at = tuple(60.0 * minute for minute in range(1, 61))
    wave = tuple(2 + math.sin(minute / 9) for minute in range(60))
    return ShownSimulation(
        name=name,
        load="trace.jsonl, 1,000 requests in an hour",
        profile="a model on a machine",
        fleet="2 prefill and 3 decode workers, with the planner",
        seconds=3600,
        classes={"": chats, "chat": chats, "batch": ShownClass(requests=9, finished=8, refused=1)},
        device_seconds=18_000,
        cost=5,
        hit_rate=0.4,
        series=(
            ReportSeries(at=at, values={"ttft_p50": wave, "ttft_p99": (None, *wave[1:]), "within": wave}),
            ReportSeries(at=at[::2], values={"decode": wave[::2]}),
        ),
        decisions=(
            ShownDecision(at=600, line=LINE, actions=("add decode: 4",), effect="ready after 61 s"),
            ShownDecision(at=1800, line="drain decode: no load", actions=("drain decode: 3",)),
        ),
        notes=("Disaggregation does not pay for this load.",),
    )


@pytest.mark.skipif(
    not is_installed(), reason="THE REPORT IS NOT TESTED IN A BROWSER: apt-get install chromium chromium-driver"
)
def test_the_page_shows_everything_and_asks_nobody(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(
        render(SimulationReport(simulations=(simulation("the fleet"), simulation("aggregated")), notes=("So.",)))
    )
    with browser(tmp_path) as window:
        window.resize(1280)
        for scheme in ("light", "dark"):
            window.prefer(scheme)
            window.open(page.as_uri())
            assert window.run("return document.querySelectorAll('.plot canvas').length") == 3
            assert window.run(CONTRASTS) == []
            assert window.run(UNNAMED) == []
        assert LINE in window.text(".decisions")
        assert "1.90s" in window.text("main")
        window.click(".decisions tbody tr:nth-child(2) button")
        assert "1800" in window.run("return JSON.stringify(JSON.parse(document.getElementById('data').textContent))")
        assert window.run("return document.querySelector('.decisions tr[aria-current]').dataset.index") == "1"
        window.run("const s = document.querySelector('select'); s.value = 1; s.dispatchEvent(new Event('change'))")
        assert window.run("return document.querySelectorAll('.plot canvas').length") == 3
        for width in (320, 1280):
            window.resize(width)
            assert window.run("return document.documentElement.scrollWidth") <= width
        assert window.errors() == []
        assert not [url for url in window.requested() if url.startswith(("http", "ws"))]
