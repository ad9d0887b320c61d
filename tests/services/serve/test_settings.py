"""Every service reads the options of `paceline serve` from one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.config import GatewayConfig, KVTransferConfig, ServeConfig, WorkerConfig
from paceline.core.config_source import Config, load_config
from paceline.services.serve.settings import served_name, stack_settings

CONFIG = ServeConfig(
    model='/models/ä "quoted" 🚲',
    max_seqs=7,
    max_model_len=100,
    drain_seconds=3,
    kv_memory="1GiB",
    cache_policy="arc",
    host="0.0.0.0",
    port=9000,
    api_key='a"b\\c',
    prefill=3,
    cache_dir="/cache",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "stack.toml"
    path.write_text(stack_settings(CONFIG, Path("/cache/ä 🚲"), "unix:///redis.sock", "c1", Path("/run/secret")))
    return path


def read(cls: type[Config], table: str, file: Path) -> Config:
    return load_config(cls, table, file, {})


def test_gateway(file: Path) -> None:
    config = read(GatewayConfig, "gateway", file)
    assert (config.host, config.port, config.api_key) == ("0.0.0.0", 9000, 'a"b\\c')
    assert (config.model, config.served_model_name) == ("/cache/ä 🚲", 'ä "quoted" 🚲')
    assert (config.redis, config.cluster, config.drain_seconds) == ("unix:///redis.sock", "c1", 3.0)
    assert config.store == "/cache/store.db"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_listen_on_a_free_port_of_this_machine_only(file: Path, role: str) -> None:
    config = read(WorkerConfig, role, file)
    assert (config.host, config.port) == ("127.0.0.1", 0)
    assert (config.model, config.max_seqs, config.max_model_len) == ("/cache/ä 🚲", 7, 100)
    assert config.packed_dir == "/cache/packed"


def test_kvtransfer(file: Path) -> None:
    config = read(KVTransferConfig, "kvtransfer", file)
    assert (config.host, config.port, config.kv_memory) == ("127.0.0.1", 0, "1GiB")
    assert config.cache_policy == "arc"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ServeConfig(model="gemma-3-270m"), "gemma-3-270m"),
        (ServeConfig(model="/models/llama/"), "llama"),
        (ServeConfig(model="some/file.gguf"), "file"),
        (ServeConfig(model="/models/llama", served_model_name="mine"), "mine"),
        (ServeConfig(model="org/name"), "org/name"),
        (ServeConfig(model="org/name/sub/file.gguf"), "file"),
    ],
)
def test_clients_call_the_model_by_its_last_name(config: ServeConfig, name: str) -> None:
    assert served_name(config) == name


@pytest.mark.parametrize(
    ("cls", "table"), [(GatewayConfig, "gateway"), (WorkerConfig, "decode"), (KVTransferConfig, "kvtransfer")]
)
def test_all_know_where_their_common_secret_is(file: Path, cls: type[Config], table: str) -> None:
    assert read(cls, table, file).auth_token_file == "/run/secret"
