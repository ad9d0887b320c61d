"""The profile `pool`: a model that is an encoder is served by a gateway and pool workers alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import transformers

from tests.models.fake_hub import FakeHub
from tests.services.pool.tiny_bert import expected_embedding, write_tiny_bert

from .conftest import Stack, output_of

pytestmark = [pytest.mark.compose, pytest.mark.thorough]


@pytest.fixture
def reference(tmp_path: Path) -> transformers.BertModel:
    folder = tmp_path / "files"
    folder.mkdir()
    model = write_tiny_bert(folder)
    (folder / "model.safetensors").chmod(0o644)  # the hub's container has another user
    return model


@pytest.fixture
def pool_stack(
    running_stack: Stack, reference: transformers.BertModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stack]:
    """A second stack, with two pool workers. Its model comes from a hub in its network."""
    project = os.environ["COMPOSE_PROJECT_NAME"] + "-hub"
    variables = {"MODEL": "org/tiny", "REVISION": "v1", "HF_ENDPOINT": "http://hub:8080", "HF_TOKEN": FakeHub().token}
    for name, value in {**variables, "COMPOSE_PROJECT_NAME": project, "HUB_FILES": str(tmp_path / "files")}.items():
        monkeypatch.setenv(name, value)
    compose = [*os.environ["PACELINE_COMPOSE"].split(), "-f", "tests/compose/hub.yaml", "--profile", "pool"]
    try:
        output_of([*compose, "up", "-d", "--scale", "pool=2", "gateway", "pool"])
        yield Stack(compose, project)
    finally:
        output_of([*compose, "down", "-v", "--timeout", "10"])


def test_pool_workers_serve_an_encoder_without_others(pool_stack: Stack, reference: transformers.BertModel) -> None:
    pool_stack.wait_for_workers("pool", 2)
    assert not pool_stack.containers("prefill") + pool_stack.containers("decode") + pool_stack.containers("kvtransfer")
    body = {"input": ["a b c", "d"]}
    answer = httpx.post(f"{pool_stack.url}/v1/embeddings", json=body, timeout=120, trust_env=False).raise_for_status()
    for text, each in zip(body["input"], answer.json()["data"], strict=True):
        assert each["embedding"] == pytest.approx(expected_embedding(reference, text).tolist(), abs=2e-5)
    pool_stack.scale("pool", 1)
    pool_stack.wait_for_workers("pool", 1)
