"""The report of a simulation: one HTML file with charts that asks no server for anything.

Its colours, type and the library of its charts are the console's.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

from paceline.services.gateway.api.console.files import STATIC, chart_files
from paceline.simulator.report.content import SimulationReport

_OWN = Path(__file__).parent
_MODULES = ("dom.js", "format.js")
"""Files of the console's page whose functions the report uses."""
_IMPORT = re.compile(r"^import .*\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def render(report: SimulationReport) -> str:
    """Return the report as HTML. If the chart library is not installed, the page has tables and no charts."""
    charts = {name: content.decode() for name, content in chart_files()}
    modules = "".join(_EXPORT.sub("", _IMPORT.sub("", (STATIC / name).read_text())) for name in _MODULES)
    # "</script" would end the script that contains the data, and "<!--" would hide its end. In JSON, "<" may be
    # escaped.
    data = report.to_json().replace("<", "\\u003c")
    parts = {
        "title": html.escape(report.simulations[0].name),
        "style": "".join((charts.get("uplot.min.css", ""), (STATIC / "base.css").read_text(), _read("report.css"))),
        "charts": charts.get("uplot.iife.min.js", ""),
        "data": data,
        "script": modules + _read("report.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda part: parts[part[1]], _read("report.html"))


def _read(name: str) -> str:
    return (_OWN / name).read_text("utf-8")
