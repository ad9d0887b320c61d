"""Two models of a hub, named in the environment, are served by containers of which only two know the hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.fake_hub import COMMIT, FakeHub
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.tiny_checkpoints import write_tiny

from .conftest import Stack, output_of

pytestmark = pytest.mark.compose

TOKEN = FakeHub().token
CLUSTERS = {"org/tiny": "default", "org/second": "second"}
"""The cluster of each model."""


@pytest.fixture
def hub_stack(running_stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A second stack with two models, which come from a hub in its network."""
    folder = write_toy_model(tmp_path / "files")
    write_tiny(folder, "llama", vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=256)
    (folder / "model.safetensors").chmod(0o644)  # the hub's container has another user
    project = os.environ["COMPOSE_PROJECT_NAME"] + "-hub"
    models = tmp_path / "models.toml"
    tables = [f'["{name}"]\nmodel = "/models/served/v1/{name}"\ncluster = "{own}"\n' for name, own in CLUSTERS.items()]
    models.write_text("".join(tables))
    revisions = {"REVISION": "v1", "SECOND_REVISION": "v1"}
    names = dict(zip(("MODEL", "SECOND"), CLUSTERS, strict=True))
    hub = {"HF_ENDPOINT": "http://hub:8080", "HF_TOKEN": TOKEN, "HUB_FILES": folder, "MODELS_FILE": models}
    for name, value in {**revisions, **names, **hub, "COMPOSE_PROJECT_NAME": project}.items():
        monkeypatch.setenv(name, str(value))
    files = ("-f", "compose/second.yaml", "-f", "tests/compose/hub.yaml")
    compose = [*os.environ["PACELINE_COMPOSE"].split(), *files, "--profile", "second"]
    try:
        output_of([*compose, "up", "-d"])
        yield Stack(compose, project)
    finally:
        output_of([*compose, "down", "-v", "--timeout", "10"])


def test_models_of_the_hub_are_served_by_their_names(hub_stack: Stack) -> None:
    for role in ("prefill", "decode"):
        hub_stack.wait_for_workers(role, len(CLUSTERS))
    assert {each["id"] for each in hub_stack.ask("GET", "/v1/models")["data"]} == CLUSTERS.keys()
    for model in CLUSTERS:
        body = {"model": model, "prompt": "Once", "max_tokens": 5, "ignore_eos": True}
        answer = hub_stack.ask("POST", "/v1/completions", json=body, timeout=120)
        assert (answer["model"], answer["usage"]["completion_tokens"]) == (model, 5)
    look = "import os; print(os.path.realpath('/models/served/v1/{}'), sorted(os.environ.items()))"
    for service in ("prefill", "decode", "second-prefill", "second-decode", "gateway"):
        model = "org/second" if service.startswith("second-") else "org/tiny"
        folder, variables = hub_stack.python(service, look.format(model)).split(maxsplit=1)
        name = f"models--{model.replace('/', '--')}"
        assert folder == f"/models/huggingface/hub/{name}/snapshots/{COMMIT}"
        assert TOKEN not in variables
        assert "('HF_HUB_OFFLINE', '1')" in variables
