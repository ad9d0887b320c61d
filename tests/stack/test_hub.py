"""`paceline serve org/name`: tiny models of a hub on loopback answer in a real stack."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
import pytest

from tests.models.fake_hub import serve_hub
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.stack.processes import Stack, serve
from tests.tiny_checkpoints import write_tiny

pytestmark = pytest.mark.stack


def test_a_model_and_its_draft_model_are_served_by_name_with_the_sampling_of_the_model(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path / "model")
    write_tiny(folder, "llama", vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=256)
    (folder / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 5}')
    with serve_hub() as hub:
        hub.add("org/tiny", folder, is_gated=True)
        hub.add("org/draft", folder)
        draft = '{"model": "org/draft", "revision": "v1", "num_speculative_tokens": 2, "adaptive": false}'
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": hub.token}
        options = ("--prefill=0", "--threads=1", "--kv-memory=64MiB", "-sc", draft)
        with serve(tmp_path / "log", "org/tiny", *options, environment=environment) as stack:
            assert [each["id"] for each in httpx.get(f"{stack.url}/v1/models").json()["data"]] == ["org/tiny"]
            # Without a temperature the generation config's applies, so answers do not differ.
            body = {"model": "org/tiny", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
            answers = [httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=120).json() for _ in range(3)]
            assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
            assert {answer["usage"]["completion_tokens"] for answer in answers} == {5}
            wait_for_drafts(stack)
            assert hub.token not in stack.process.text
    log = (tmp_path / "log").read_text()
    assert re.findall(r"downloading .* of (org/\w+)", log) == ["org/draft", "org/tiny"]


def wait_for_drafts(stack: Stack) -> None:
    """Wait until the worker has reported that draft tokens were verified."""
    deadline = time.monotonic() + 30
    while not any(worker["stats"].get("draft_tokens") for worker in stack.fleet()["workers"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
