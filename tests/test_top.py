from __future__ import annotations

from typing import Any

import pytest

from paceline.client import GatewayClient
from paceline.core.errors import UnavailableError
from paceline.top import render, top


def fleet(**stats: float) -> dict[str, Any]:
    worker = {"worker_id": "decode-0", "role": "decode", "state": "ready", "running": 3, "waiting": 0, "stats": stats}
    worker |= {"numerics": None, "model_name": "m"}
    host = {"host_id": "h", "total": 10, "held": 2, "in_flight": 1, "cached": 3, "free": 4, "hit_rate": 0.25}
    host |= {"balanced": True, "leases": []}
    return {"workers": [worker, {**worker, "role": "kvtransfer"}], "hosts": [host], "waiting": 7}


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = fleet(sampled_tokens=100, steps=50, busy_seconds=1.0, bubble_seconds=0.0, plan_seconds=0.0)
    now = fleet(
        sampled_tokens=180, steps=70, busy_seconds=2.8, bubble_seconds=0.02, plan_seconds=0.1, output_seconds=0.2,
        drafts=20, draft_tokens=80, accepted_tokens=60,
    )  # fmt: skip
    title, worker, *rest = render(before, now, 2.0)
    assert worker.split() == [
        "decode-0",
        "decode",
        "ready",
        "3",
        "0",
        "40.0",
        "10.0",
        "90.0%",
        "1.0%",
        "5.0%",
        "10.0%",
        "75%",
        "4.00",
        "-",
        "-",
        "-",
        "-",
    ]
    assert len(title.split()) == len(worker.split())
    assert rest == [
        "",
        "h: 10 blocks: 2 held, 1 in flight, 3 cached, 4 free; prefix hits 25%",
        "waiting at the gateway: 7",
    ]


def test_a_worker_that_has_just_come_and_drafts_nothing_is_shown() -> None:
    now = fleet(sampled_tokens=10, steps=10)
    worker = render({**now, "workers": []}, now, 1.0)[1]
    assert worker.split()[5:] == ["10.0", "10.0", "0.0%", "0.0%", "0.0%", "0.0%", "-", "-", "-", "-", "-", "-"]


def test_workers_of_several_models_stand_below_their_names() -> None:
    now = fleet(sampled_tokens=10)
    other = {**now["workers"][0], "model_name": "n", "stats": {"sampled_tokens": 30}}
    now["workers"].append(other)
    before = {**now, "workers": [{**each, "stats": {"sampled_tokens": 0}} for each in now["workers"]]}
    lines = render(before, now, 1.0)
    assert [line.split()[0] for line in lines[1:5]] == ["m:", "decode-0", "n:", "decode-0"]
    assert [line.split()[5] for line in (lines[2], lines[4])] == ["10.0", "30.0"]


def test_adapters_are_shown_if_there_are_any() -> None:
    before = fleet(lora_adapters=4, lora_loads=10, lora_load_seconds=1.0, lora_evictions=1)
    now = fleet(lora_adapters=5, lora_loads=14, lora_load_seconds=1.4, lora_evictions=2)
    adapters = [
        {"name": f"{name} " + 40 * "x", "running": running, "waiting": 1, "workers": ["a", "b"]}
        for name, running in zip("abcdefghij", range(10))
    ]
    idle = {"name": "idle", "running": 0, "waiting": 0, "workers": []}
    lines = render(before, {**now, "adapters": [*adapters, idle]}, 2.0)[4:]
    assert lines[0] == "waiting at the gateway: 7"
    assert lines[1] == "decode-0: 5 adapters; 2.0 loads/s of 100 ms, 0.5 evictions/s"
    assert lines[2] == f"adapter a {22 * 'x'}: 0 running, 1 waiting; on 2 workers"
    assert len(lines) == 11
    assert lines[10] == "and 2 more adapters"
    assert all(len(line) <= 80 for line in lines)
    assert render(before, {**fleet(lora_adapters=0), "adapters": [idle]}, 1.0)[5:] == []


def test_pooled_tokens_count_beside_those_that_are_generated() -> None:
    before, now = fleet(pooled_tokens=100, sampled_tokens=5), fleet(pooled_tokens=900, sampled_tokens=25)
    assert render(before, now, 4.0)[1].split()[5] == "205.0"


def test_the_work_of_encoders_is_shown() -> None:
    before, now = fleet(encodings_computed=2, encode_seconds=1.0), fleet(encodings_computed=12, encode_seconds=2.0)
    assert render(before, now, 4.0)[1].split()[-4:] == ["2.5", "25.0%", "-", "-"]


def test_the_numerics_of_a_worker_are_shown() -> None:
    now = fleet()
    now["workers"][0]["numerics"] = "portable bfloat16"
    assert render(now, now, 1.0)[1].endswith("  portable bfloat16   ")


def test_the_oldest_lease_and_an_imbalance_are_seen() -> None:
    now = fleet()
    lease = {"age_ms": 83_250, "blocks": 7, "state": "filling", "owner": "decode-0", "key": {"request_id": "cmpl-1"}}
    now["hosts"][0] |= {"leases": [lease, {**lease, "age_ms": 5}], "balanced": False}
    line = render(now, now, 1.0)[-2]
    assert line.endswith("; oldest lease 83.2 s (7 blocks, filling, of decode-0, cmpl-1)")
    assert "OUT OF BALANCE" in line


def test_without_a_gateway_there_is_one_clear_sentence() -> None:
    with pytest.raises(UnavailableError, match=r"no gateway at http://127\.0\.0\.1:9 .*--url"):
        top(GatewayClient("http://127.0.0.1:9"), 0.1, 1)


def test_the_size_of_weights_is_a_column() -> None:
    now = fleet(weight_bytes_int4=3e9, weight_bytes_bfloat16=5e8)
    title, worker, *_ = render(now, now, 1.0)
    assert worker[title.index("WEIGHTS") :].split()[:2] == ["3.5", "GB"]
