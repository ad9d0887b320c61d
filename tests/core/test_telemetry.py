"""Log lines as text and as JSON, with the trace that they belong to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

from paceline.core.telemetry import carrier_of

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, because logs and traces are set up once per process."""
    prelude = "import logging\nfrom paceline.core.telemetry import *\nlog = logging.getLogger('a.b')\n"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, "-c", prelude + program],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def json_lines(program: str) -> list[dict[str, Any]]:
    done = run(f"setup('decode-1', 'info', 'json')\n{program}")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_json_line_has_all_that_a_machine_asks_for() -> None:
    (line,) = json_lines("log.info('took %d', 3, extra={'blocks': 7, 'who': object})")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", line.pop("time"))
    assert line == {
        "level": "info",
        "service": "decode-1",
        "logger": "a.b",
        "message": "took 3",
        "request_id": None,
        "trace_id": None,
        "blocks": 7,
        "who": "<class 'object'>",
    }


def test_an_exception_stays_in_its_line() -> None:
    (line,) = json_lines("try: 1 / 0\nexcept ZeroDivisionError: log.exception('a\\nb')")
    assert line["message"] == "a\nb"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ZeroDivisionError: division by zero")


def test_lines_of_a_request_carry_its_ids_and_those_behind_it_do_not() -> None:
    inside, headers, nested, behind = json_lines(
        f"with request_span('decode', 'r1', {{'traceparent': '{TRACEPARENT}'}}):\n"
        "    log.info('inside')\n"
        "    log.info(dict(trace_headers())['traceparent'])\n"
        "    with request_span('step', 'r2'): log.info('nested')\n"
        "log.info('behind')"
    )
    assert (inside["request_id"], inside["trace_id"]) == ("r1", TRACE)
    assert headers["message"].split("-")[1] == TRACE
    assert headers["message"] != TRACEPARENT
    assert (nested["request_id"], nested["trace_id"]) == ("r2", TRACE)
    assert (behind["request_id"], behind["trace_id"]) == (None, None)


def test_a_request_without_a_trace_begins_one() -> None:
    first, second = json_lines("for name in 'ab':\n    with request_span('x', name, {}): log.info('')")
    assert first["trace_id"] != second["trace_id"]
    assert all(re.fullmatch(r"[0-9a-f]{32}", line["trace_id"]) for line in (first, second))


def test_a_text_line_is_short() -> None:
    done = run(
        "setup('decode-1', 'warning', 'text')\nlog.info('not this')\nlog.warning('look')\n"
        "with request_span('x', 'r1'): log.error('there')"
    )
    first, second = done.stderr.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d decode-1     WARNING look", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d decode-1     ERROR   there  \[r1\]", second)


def test_a_level_that_is_none() -> None:
    assert "ValueError: Unknown level: 'LOUD'" in run("setup('x', 'loud', 'text')").stderr


def test_a_missing_exporter_is_told_with_its_package() -> None:
    hide = "import sys; sys.modules['opentelemetry.exporter.otlp.proto.http.trace_exporter'] = None\n"
    done = run(f"{hide}setup('x', 'info', 'text')", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert "ConfigError: OTEL_EXPORTER_OTLP_ENDPOINT is set; install the exporter: pip install" in done.stderr


def test_of_metadata_only_text_is_carried() -> None:
    assert carrier_of([("traceparent", TRACEPARENT), ("key-bin", b"\x00")]) == {"traceparent": TRACEPARENT}
    assert carrier_of(None) == {}
