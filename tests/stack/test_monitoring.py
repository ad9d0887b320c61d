"""The dashboard and the alert rules in compose/, checked by a real Prometheus that scrapes a real stack."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.common.services import Process, free_port
from tests.stack.processes import Stack
from tests.stack.stacks import Way, on

COMPOSE = Path(__file__).parents[2] / "compose"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
PATIENCE = 120.0

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(
        PROMTOOL is None or PROMETHEUS is None, reason="Prometheus is not installed (Debian: prometheus)"
    ),
]


def test_the_rules_hold_for_healthy_stacks_and_for_stacks_in_trouble() -> None:
    for words in (["check", "config", "prometheus.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            [str(PROMTOOL), *words], cwd=COMPOSE / "prometheus", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def queries() -> dict[str, str]:
    """Return what the dashboard and the alert rules query, by title. Comparisons of alerts are left out."""
    found = {}
    for panel in json.loads((COMPOSE / "grafana" / "paceline.json").read_text())["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"].replace("$__rate_interval", "20s")
    for group in yaml.safe_load((COMPOSE / "prometheus" / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            found[rule["alert"]] = re.sub(r" (>|<|==) [0-9.]+$", "", rule["expr"])
    return found


@pytest.fixture
def prometheus(stack: Stack, tmp_path: Path) -> Iterator[str]:
    """Yield the URL of a Prometheus that scrapes the stack each second, and is otherwise configured as in compose."""
    config: dict[str, Any] = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(COMPOSE / "prometheus" / "alerts.yaml")]
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [stack.url.removeprefix("http://")]}]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    files = (f"--config.file={tmp_path / 'prometheus.yaml'}", f"--storage.tsdb.path={tmp_path / 'data'}")
    process = Process(
        tmp_path / "prometheus.log", *files, f"--web.listen-address={address}", program=(str(PROMETHEUS),)
    )
    yield f"http://{address}"
    process.stop()


async def without_data(http: httpx.AsyncClient, url: str) -> list[str]:
    """Return the titles of queries that give no number."""
    missing = []
    for title, query in queries().items():
        try:
            reply = (await http.get(f"{url}/api/v1/query", params={"query": query})).json()
        except httpx.TransportError:
            return ["Prometheus has not started"]
        assert reply["status"] == "success", (title, reply)
        if not any(series["value"][1] != "NaN" for series in reply["data"]["result"]):
            missing.append(title)
    return missing


@pytest.mark.model
@on("float32")
async def test_every_query_gets_data(stack: Stack, way: Way, prometheus: str) -> None:
    body = {"model": way.model, "prompt": "to and fro " * 8, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    missing = ["all"]
    async with httpx.AsyncClient(timeout=30) as http:
        try:
            async with asyncio.timeout(PATIENCE):
                while missing:
                    assert (await http.post(f"{stack.url}/v1/completions", json=body)).status_code == 200
                    await asyncio.sleep(0.5)
                    missing = await without_data(http, prometheus)
        except TimeoutError:
            pytest.fail(f"no data: {missing}")
        targets = (await http.get(f"{prometheus}/api/v1/targets")).json()["data"]["activeTargets"]
        assert [target["lastError"] for target in targets] == [""]
