from __future__ import annotations

import pytest

from bench.common.systems import ServerError
from bench.serving.phases import beside, parse, show, split


def metrics(**seconds: float) -> str:
    """Return metrics as a gateway shows them, with two workers that have equal counters."""
    lines = []
    for name, value in seconds.items():
        match name.split("__"):
            case [phase, kind]:
                for worker in "ab":
                    labels = f'{{phase="{phase}",kind="{kind}",worker="{worker}"}}'
                    lines.append(f"paceline:worker_request_step_seconds_total{labels} {value / 2}")
            case [("plan" | "output" | "bubble") as kind]:
                lines.append(f'paceline:worker_step_seconds_total{{kind="{kind}",worker="a"}} {value}')
            case _:
                lines.append(f'paceline:{name}_seconds_sum{{model_name="toy"}} {value}')
    return "\n".join(lines) + "\n"


BEFORE = metrics(e2e_request_latency=100.0, prefill__model=50.0)
AFTER = metrics(
    e2e_request_latency=190.0,
    request_queue_time=5.0,
    request_prefill_time=25.0,
    request_handoff_time=2.0,
    request_decode_time=60.0,
    prefill__model=60.0,
    prefill__other=1.0,
    decode__model=40.0,
    decode__other=8.0,
    plan=3.0,
    output=2.0,
    bubble=1.0,
)


def test_a_client_s_time_is_split_by_what_its_requests_did() -> None:
    found = split(parse(BEFORE), parse(AFTER), client_seconds=93.0, tokens=1000)
    assert found == {
        "gateway and client": pytest.approx(3.0),
        "in line": 5.0,
        "prefill: in the model": 10.0,
        "prefill: beside it": 1.0,
        "prefill: waiting": pytest.approx(14.0),
        "handoff": 2.0,
        "decode: in the model": 40.0,
        "decode: beside it": 8.0,
        "decode: waiting": pytest.approx(10.0),
    }
    assert sum(found.values()) == pytest.approx(93.0)


def test_threads_beside_are_shown_without_a_share() -> None:
    before, after = parse(BEFORE), parse(AFTER)
    own = {"phases": split(before, after, 93.0, 1000), "beside": beside(before, after, 1000)}
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in show({"eight": own}).splitlines()]
    assert lines[0] == ["phase", "eight: ms a token", "share"]
    assert ["in line", "5.000", "5.4%"] in lines
    assert ["all", "93.000", "100.0%"] in lines
    assert ["host threads: planning", "3.000", ""] in lines


def test_a_server_that_does_not_count_this_is_told() -> None:
    with pytest.raises(ServerError, match="request_handoff_time"):
        split(parse(BEFORE), parse(BEFORE), 1.0, 1)
