"""The monitoring profile and TLS: Prometheus scrapes a stack without certificates, and one with them."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.authority import Authority
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.tiny_checkpoints import write_tiny

from .conftest import ROOT, Stack, output_of

pytestmark = pytest.mark.compose

USER = 10001
"""The user in the containers."""
MONITORED = ("--profile", "monitoring")


def check_scrapes(stack: Stack) -> None:
    """Check that Prometheus scrapes the gateway and knows the alert rules."""

    def ask(path: str) -> Any:
        url = f"http://prometheus:9090/api/v1/{path}"
        code = f"import urllib.request as r; print(r.urlopen('{url}', timeout=10).read().decode())"
        return json.loads(stack.python("gateway", code))["data"]

    def found(query: str) -> list[str]:
        return [each["value"][1] for each in ask(f"query?query={query}")["result"]]

    stack.wait("scraped gateway", lambda: found("up") == ["1"])
    assert float(found("sum(paceline:worker_up)")[0]) >= 2
    assert any(group["rules"] for group in ask("rules")["groups"])


def test_prometheus_scrapes_the_gateway(stack: Stack) -> None:
    stack.compose(*MONITORED, "up", "-d", "--no-deps", "prometheus")
    try:
        check_scrapes(stack)
    finally:
        stack.compose(*MONITORED, "rm", "-sf", "prometheus")


def uncommented(source: Path, keys: str) -> str:
    """Return a file with those of its settings that are only comments and match `keys`."""
    return re.sub(rf"^( *)# (?={keys})", r"\1", source.read_text(), flags=re.MULTILINE)


@pytest.fixture
def tls_stack(running_stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A second stack with a tiny model, certificates and Prometheus."""
    model = write_toy_model(tmp_path / "models" / "tiny")
    write_tiny(model, "llama", vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=256)
    authority = Authority(tmp_path / "tls")
    authority.issue(tmp_path / "tls", "paceline", "127.0.0.1")
    for path in (tmp_path / "models", *(tmp_path / "models").rglob("*"), *(tmp_path / "tls").iterdir()):
        os.chown(path, USER, USER)
    (tmp_path / "tls" / "ca.pem").chmod(0o644)
    config, prometheus = tmp_path / "paceline.toml", tmp_path / "prometheus"
    config.write_text(uncommented(ROOT / "compose" / "paceline.toml", "cluster-|ssl-"))
    shutil.copytree(ROOT / "compose" / "prometheus", prometheus)
    scraped = prometheus / "prometheus.yaml"
    scraped.write_text(uncommented(scraped, "scheme|tls_config"))
    project = os.environ["COMPOSE_PROJECT_NAME"] + "-tls"
    variables = {"MODEL": "tiny", "MODELS": tmp_path / "models", "TLS": tmp_path / "tls", "CONFIG": config}
    for name, value in {**variables, "COMPOSE_PROJECT_NAME": project, "PROMETHEUS_FILES": prometheus}.items():
        monkeypatch.setenv(name, str(value))
    files = ("-f", "compose/tls.yaml", "-f", "tests/compose/tls.yaml")
    compose = [*os.environ["PACELINE_COMPOSE"].split(), *files, *MONITORED]
    try:
        output_of([*compose, "up", "-d"])
        yield Stack(compose, project, ssl.create_default_context(cafile=authority.file))
    finally:
        output_of([*compose, "down", "-v", "--timeout", "10"])


def test_services_clients_and_prometheus_speak_tls(tls_stack: Stack) -> None:
    for role in ("prefill", "decode"):
        tls_stack.wait_for_workers(role, 1)
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 5, "ignore_eos": True}
    answer = tls_stack.ask("POST", "/v1/completions", json=body, timeout=120)
    assert answer["usage"]["completion_tokens"] == 5
    with pytest.raises(httpx.TransportError):
        httpx.get(tls_stack.url.replace("https", "http"), trust_env=False)
    for service in ("kvtransfer", "prefill", "decode"):
        code = (
            "import socket, ssl; own = ssl.create_default_context(cafile='/tls/ca.pem'); "
            f"plain = socket.create_connection(('{service}', 7300), 5); "
            "print(own.wrap_socket(plain, server_hostname='paceline').version())"
        )
        assert tls_stack.python("gateway", code) == "TLSv1.3"
    check_scrapes(tls_stack)
