"""A model of a hub, named in the environment, is served by containers of which only one knows the hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.models.fake_hub import COMMIT, FakeHub
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.tiny_checkpoints import write_tiny

from .conftest import Stack, output_of

pytestmark = pytest.mark.compose

TOKEN = FakeHub().token


@pytest.fixture
def hub_stack(running_stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A second stack, whose model comes from a hub in its network."""
    folder = write_toy_model(tmp_path / "files")
    write_tiny(folder, "llama", vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=256)
    (folder / "model.safetensors").chmod(0o644)  # the hub's container has another user
    project = os.environ["COMPOSE_PROJECT_NAME"] + "-hub"
    variables = {"MODEL": "org/tiny", "REVISION": "v1", "HF_ENDPOINT": "http://hub:8080", "HF_TOKEN": TOKEN}
    for name, value in {**variables, "COMPOSE_PROJECT_NAME": project, "HUB_FILES": str(folder)}.items():
        monkeypatch.setenv(name, value)
    compose = [*os.environ["PACELINE_COMPOSE"].split(), "-f", "tests/compose/hub.yaml"]
    try:
        output_of([*compose, "up", "-d"])
        yield Stack(compose, project)
    finally:
        output_of([*compose, "down", "-v", "--timeout", "10"])


def test_a_model_of_the_hub_is_served_by_its_name(hub_stack: Stack) -> None:
    for role in ("prefill", "decode"):
        hub_stack.wait_for_workers(role, 1)
    assert [each["id"] for each in httpx.get(f"{hub_stack.url}/v1/models", trust_env=False).json()["data"]] == [
        "org/tiny"
    ]
    body = {"model": "org/tiny", "prompt": "Once", "max_tokens": 5, "ignore_eos": True}
    answer = (
        httpx.post(f"{hub_stack.url}/v1/completions", json=body, timeout=120, trust_env=False).raise_for_status().json()
    )
    assert answer["usage"]["completion_tokens"] == 5
    look = "import os; print(os.path.realpath('/models/served/v1/org/tiny'), sorted(os.environ.items()))"
    for service in ("prefill", "decode", "gateway"):
        folder, variables = hub_stack.python(service, look).split(maxsplit=1)
        assert folder == f"/models/huggingface/hub/models--org--tiny/snapshots/{COMMIT}"
        assert TOKEN not in variables
        assert "('HF_HUB_OFFLINE', '1')" in variables
