"""Options: the sources of their values, the values that are refused, and the error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.core.config import (
    GIB,
    GatewayConfig,
    KVTransferConfig,
    ServeConfig,
    ServiceConfig,
    WorkerConfig,
)
from paceline.core.config_source import load_config
from paceline.core.errors import ConfigError
from paceline.core.options import flag, listed, parse_bytes, range_of, secrets_of

CONFIGS: list[type[Any]] = [GatewayConfig, WorkerConfig, KVTransferConfig, ServeConfig]


def load(tmp_path: Path, toml: str, cls: type[Any] = WorkerConfig, table: str = "decode", **flags: Any) -> Any:
    file = tmp_path / "paceline.toml"
    file.write_text(toml)
    return load_config(cls, table, file, flags)


def test_without_file_and_flags_all_is_default() -> None:
    assert load_config(WorkerConfig, "decode", None, {}) == WorkerConfig()


@pytest.mark.parametrize(
    ("top", "table", "flag", "value"),
    [
        (None, None, None, 64),
        (10, None, None, 10),
        (10, 20, None, 20),
        (None, 20, 30, 30),
        (10, 20, 30, 30),
        (10, 20, 64, 64),  # a flag wins even if its value is the default
    ],
)
def test_flag_before_table_before_top_before_default(
    tmp_path: Path, top: int | None, table: int | None, flag: int | None, value: int
) -> None:
    toml = "" if top is None else f"max-seqs = {top}\n"
    toml += "" if table is None else f"[decode]\nmax-seqs = {table}\n"
    flags = {} if flag is None else {"max_seqs": flag}
    assert load(tmp_path, toml, **flags).max_seqs == value


def test_the_top_is_for_whom_it_concerns_and_tables_are_for_one(tmp_path: Path) -> None:
    toml = 'max-seqs = 5\narena-dir = "/arena"\n[prefill]\nmax-seqs = 6\n[gateway]\nport = 1\n'
    assert load(tmp_path, toml).max_seqs == 5
    assert load(tmp_path, toml, table="prefill").max_seqs == 6
    assert load(tmp_path, toml, KVTransferConfig, "kvtransfer").arena_dir == "/arena"
    assert load(tmp_path, toml, GatewayConfig, "gateway").port == 1


@pytest.mark.parametrize("key", ["max-seqs", "max_seqs"])
def test_dash_and_underscore_are_one(tmp_path: Path, key: str) -> None:
    assert load(tmp_path, f"{key} = 3").max_seqs == 3


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[decode]\nmax-sequences = 3", r"\[decode\] has no option 'max-sequences'; see paceline decode --help"),
        ("max-seqs = '3'", "max-seqs must be of type int, not str"),
        ("max-seqs = true", "max-seqs must be of type int, not bool"),
        ("max-seqs = 3.0", "max-seqs must be of type int, not float"),
        ("model = 3", "model must be of type str, not int"),
        ("decode = 3", r"decode must be a table of options, \[decode\]"),
        ("max-seqs = ", "cannot read .*paceline.toml: "),
        ("max-seqs = 0", "--max-seqs must be at least 1, not 0"),
        ("port = 65536", "--port must be from 0 to 65535, not 65536"),
        ("drain-seconds = nan", "--drain-seconds must be from 0 to 86400, not nan"),
        ("max-batched-tokens = 63", "--max-batched-tokens 63 is less than --max-seqs 64: .*; raise the first or lower"),
    ],
)
def test_what_is_wrong_in_a_file_is_told(tmp_path: Path, toml: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(tmp_path, toml)


def test_a_whole_number_is_good_for_seconds(tmp_path: Path) -> None:
    seconds = load(tmp_path, "drain-seconds = 3").drain_seconds
    assert (seconds, type(seconds)) == (3.0, float)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read /no/such/file"):
        load_config(WorkerConfig, "decode", Path("/no/such/file"), {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(WorkerConfig, "decode", tmp_path / "binary", {})


def test_a_flag_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no option --max-sequences"):
        load_config(WorkerConfig, "decode", None, {"max_sequences": 3})


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_option_has_a_help_text_and_a_valid_default(cls: type[Any]) -> None:
    assert load_config(cls, "any", None, {}) == cls()
    assert all(field.description for field in cls.model_fields.values())


@pytest.mark.parametrize("cls", CONFIGS)
def test_a_number_beyond_its_range_names_its_flag(cls: type[Any]) -> None:
    for name, field in cls.model_fields.items():
        for bound, beyond in zip(range_of(cls, name), (-1, 1)):
            if bound is None:
                continue
            with pytest.raises(ConfigError, match=f"^{flag(name)} must be "):
                load_config(cls, "any", None, {name: type(field.default)(bound + beyond)})


def test_an_option_of_serve_means_what_it_means_in_its_service() -> None:
    services: list[type[ServiceConfig]] = [GatewayConfig, WorkerConfig, KVTransferConfig]
    owners = {name: cls for cls in services for name in cls.model_fields}
    same = [name for name in ServeConfig.model_fields if name in owners]
    assert len(same) >= 15
    for name in same:
        assert ServeConfig.model_fields[name].annotation == owners[name].model_fields[name].annotation
        if name not in ("model", "redis", "host", "port"):
            assert range_of(ServeConfig, name) == range_of(owners[name], name)


def test_options_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        WorkerConfig().max_seqs = 3  # type: ignore[misc]


POOLS = {"kv_pool": "device", "kv_pool_memory": "1GiB", "kv_memory": "8GiB"}


def test_memory_of_pools_and_of_the_host_are_two_options(tmp_path: Path) -> None:
    ServeConfig(**POOLS)
    with pytest.raises(ConfigError, match="give --kv-pool-memory, too"):
        ServeConfig(kv_pool="device", kv_memory="1GiB")
    with pytest.raises(ConfigError, match="--kv-pool-memory needs --kv-pool device"):
        ServeConfig(kv_pool_memory="1GiB")


@pytest.mark.parametrize(
    ("cls", "table", "toml", "sentence"),
    [
        (
            ServeConfig,
            "serve",
            "[serve]\nkv-tier-memory = '1GiB'",
            "it is --kv-memory now, and what was --kv-memory is",
        ),
        (WorkerConfig, "decode", "[decode]\nkv-memory = '1GiB'", "own pool is --kv-pool-memory now"),
        (
            WorkerConfig,
            "decode",
            "kv-pool = 'device'\nkv-memory = '1GiB'",
            "give kv-pool-memory, too",
        ),
    ],
)
def test_a_file_of_an_earlier_release_gets_the_new_name(
    tmp_path: Path, cls: type[Any], table: str, toml: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(tmp_path, toml, cls, table)


def test_a_file_of_an_earlier_release_without_pools_goes_on_to_work(tmp_path: Path) -> None:
    toml = "kv-memory = '1GiB'\n[decode]\nmax-seqs = 8\n"
    assert load(tmp_path, toml, KVTransferConfig, "kvtransfer").kv_memory == "1GiB"
    assert load(tmp_path, toml).max_seqs == 8


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (GatewayConfig, {"ssl_certfile": "c"}, "--ssl-certfile needs --ssl-keyfile"),
        (ServeConfig, {"ssl_keyfile": "k"}, "--ssl-keyfile needs --ssl-certfile"),
        (GatewayConfig, {"ssl_ca_certs": "a"}, "--ssl-ca-certs needs --ssl-certfile"),
        (ServeConfig, {"ssl_cert_reqs": 2, "ssl_certfile": "c", "ssl_keyfile": "k"}, "2 needs --ssl-ca-certs"),
        (GatewayConfig, {"ssl_ca_certs": "a", "ssl_certfile": "c", "ssl_keyfile": "k"}, "--ssl-cert-reqs 1 or 2"),
        (WorkerConfig, {"cluster_certfile": "c"}, "--cluster-certfile needs --cluster-keyfile"),
        (KVTransferConfig, {"cluster_certfile": "c", "cluster_keyfile": "k"}, "needs --cluster-ca-certs"),
        (GatewayConfig, {"cluster_ca_certs": "a"}, "--cluster-ca-certs needs --cluster-certfile"),
        (WorkerConfig, {"cluster_cert_name": "n"}, "--cluster-cert-name needs --cluster-certfile"),
    ],
)
def test_half_a_certificate_is_refused(cls: type[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cls(**options)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * GIB),
        ("4G", 4 * GIB),
        (" 4 gb ", 4 * GIB),
        ("1.5KiB", 1536),
        ("512MiB", GIB // 2),
        ("2T", 2048 * GIB),
        ("7", 7),
        ("7b", 7),
    ],
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "1PiB", "GiB", "1 2", "1,5GiB", "1GiBs"])
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an amount of memory; write it like 512MiB or 4GiB"):
        parse_bytes(text)


@given(st.integers(0, 1 << 20), st.sampled_from(["", "K", "M", "G"]))
def test_units_are_powers_of_1024(amount: int, unit: str) -> None:
    assert parse_bytes(f"{amount}{unit}") == amount * 1024 ** ["", "K", "M", "G"].index(unit)


def test_options_with_secrets_do_not_show_them() -> None:
    assert secrets_of(GatewayConfig) == {"api_key", "admin_key", "redis", "store"}
    for cls in (GatewayConfig, ServeConfig):
        config = cls(**dict.fromkeys(secrets_of(cls), "do-not-show"))
        assert "do-not-show" not in f"{config!r} {config}"
        with pytest.raises(ConfigError) as caught:
            cls(api_key=["do-not-show"])
        assert "do-not-show" not in str(caught.value)


def test_lists_are_separated_by_commas() -> None:
    assert listed(" a, b c ,,") == ("a", "b c")
