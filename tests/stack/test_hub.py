"""`paceline serve org/name`: a tiny model of a hub on loopback answers in a real stack."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.models.fake_hub import serve_hub
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.stack.processes import serve
from tests.tiny_checkpoints import write_tiny

pytestmark = pytest.mark.stack


def test_a_model_is_served_by_its_name_with_its_own_sampling(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path / "model")
    write_tiny(folder, "llama", vocab_size=VOCAB_SIZE, bos_token_id=None, eos_token_id=256)
    (folder / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 5}')
    with serve_hub() as hub:
        hub.add("org/tiny", folder, is_gated=True)
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": hub.token}
        options = ("--prefill=0", "--threads=1", "--kv-memory=64MiB")
        with serve(tmp_path / "log", "org/tiny", *options, environment=environment) as stack:
            assert [each["id"] for each in httpx.get(f"{stack.url}/v1/models").json()["data"]] == ["org/tiny"]
            # Without a temperature the generation config's applies, so answers do not differ.
            body = {"model": "org/tiny", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
            answers = [httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=120).json() for _ in range(3)]
            assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
            assert {answer["usage"]["completion_tokens"] for answer in answers} == {5}
            assert hub.token not in stack.process.text
    assert "downloading" in (tmp_path / "log").read_text()
