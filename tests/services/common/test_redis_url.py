from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.services import load_service_config
from paceline.core.errors import ConfigError
from paceline.services.common.redis_url import with_password, without_password


def password_file(folder: Path, text: str = "pass", mode: int = 0o600) -> str:
    file = folder / "password"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def test_a_password_is_not_shown() -> None:
    url = "rediss://me:pass@host:6380/0?password=word&ssl_password=key&db=1"
    assert without_password(url) == "rediss://…@host:6380/0?password=…&ssl_password=…&db=1"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host:6379/0", "redis://:p%40s%2F%3As@host:6379/0"),
        ("rediss://me@host:6379/0?ssl_ca_certs=ca.pem", "rediss://me:p%40s%2F%3As@host:6379/0?ssl_ca_certs=ca.pem"),
        ("redis://[::1]:6379/0", "redis://:p%40s%2F%3As@[::1]:6379/0"),
        ("unix:///run/redis.sock", "unix://:p%40s%2F%3As@/run/redis.sock"),
    ],
)
def test_the_password_of_a_file_goes_into_the_url(url: str, expected: str, tmp_path: Path) -> None:
    assert with_password(url, password_file(tmp_path, "p@s/:s\n")) == expected
    assert without_password(expected) == url.replace("//me@", "//").replace("//", "//…@")


def test_without_a_file_the_url_stays() -> None:
    assert with_password("redis://:pass@host:6379/0", "") == "redis://:pass@host:6379/0"


@pytest.mark.parametrize("url", ["redis://:word@host:6379/0", "redis://host:6379/0?password=word"])
def test_two_passwords_are_one_too_many(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="take it out of the URL") as caught:
        with_password(url, password_file(tmp_path))
    assert "word@" not in str(caught.value)


def test_a_file_that_is_no_good_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --redis"):
        with_password("", password_file(tmp_path))
    with pytest.raises(ConfigError, match=r"is empty; `paceline token FILE` makes a password"):
        with_password("redis://host", password_file(tmp_path, "\n"))
    with pytest.raises(ConfigError, match="chmod 600"):
        with_password("redis://host", password_file(tmp_path, mode=0o644))


def test_every_service_reads_it_and_shows_it_to_nobody(tmp_path: Path) -> None:
    flags = {"redis": "redis://host:6379/0", "redis_password_file": password_file(tmp_path)}
    for name in ("kvtransfer", "planner", "serve"):
        config = load_service_config(name, None, dict(flags))
        assert config.redis == "redis://:pass@host:6379/0"
        assert not config.redis_password_file  # `serve` hands on the URL alone
        assert "pass@" not in repr(config)
