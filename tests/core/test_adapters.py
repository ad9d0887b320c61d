"""The option --lora-modules, and the digest of an adapter's content."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.core.adapters import adapter_folders, read_adapter, read_adapter_files
from paceline.core.config import GatewayConfig, WorkerConfig
from paceline.core.errors import ConfigError, ModelError


@dataclasses.dataclass
class Options:
    lora_modules: str
    enable_lora: bool = True


@pytest.mark.parametrize(
    "text",
    [
        "a=/x, b=/y/z",
        '[{"name": "a", "path": "/x"}, {"name": "b", "path": "/y/z", "base_model_name": "m"}]',
    ],
)
def test_adapters_are_named_as_in_vllm(text: str) -> None:
    assert adapter_folders(Options(text)) == {"a": "/x", "b": "/y/z"}
    assert adapter_folders(Options('{"name": "a", "path": "/x"}')) == {"a": "/x"}
    assert adapter_folders(Options("", enable_lora=False)) == {}


@pytest.mark.parametrize(
    "text", ["a", "=x", "a=", "a=/x,a=/y", "[1]", '{"name": "a"}', '{"name": 1, "path": "x"}', "[", "{"]
)
def test_a_wrong_value_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="--lora-modules"):
        adapter_folders(Options(text))


def test_options_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs --enable-lora"):
        GatewayConfig(lora_modules="a=/x")
    with pytest.raises(ConfigError, match="--max-cpu-loras 2 is less than --max-loras 3"):
        WorkerConfig(enable_lora=True, max_loras=3, max_cpu_loras=2)
    assert WorkerConfig(max_loras=3).max_adapters == 12


def test_the_digest_covers_both_files(tmp_path: Path) -> None:
    found = set()
    for config, tensors in ((b"a", b"b"), (b"ab", b""), (b"", b"ab"), (b"a", b"c")):
        (tmp_path / "adapter_config.json").write_bytes(config)
        (tmp_path / "adapter_model.safetensors").write_bytes(tensors)
        named = read_adapter("x", str(tmp_path))
        assert named == read_adapter("x", str(tmp_path))
        assert named.digest == read_adapter_files(tmp_path).digest
        found.add(named.digest)
    assert len(found) == 4
    with pytest.raises(ModelError, match="cannot be read"):
        read_adapter("x", str(tmp_path / "none"))
