"""The file with the secret that all services share."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.services.common.secret import Secret, make_secret, others_may_open, read_secret


def written(folder: Path, content: bytes, mode: int = 0o600) -> str:
    file = folder / "token"
    file.write_bytes(content)
    file.chmod(mode)
    return str(file)


def test_a_new_secret_is_random_and_for_its_owner_alone(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        make_secret(file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    first, second = (file.read_text().strip() for file in files)
    assert read_secret(str(files[0]))
    assert len(first) >= 43
    assert first != second


def test_a_secret_that_is_there_stays(tmp_path: Path) -> None:
    file = tmp_path / "token"
    make_secret(file)
    before = file.read_text()
    make_secret(file)
    assert file.read_text() == before


def test_where_it_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*/nowhere/token: No such file"):
        make_secret(tmp_path / "nowhere" / "token")


def test_a_line_end_is_no_part_of_it(tmp_path: Path) -> None:
    assert read_secret(written(tmp_path, b"  0123456789abcdef\r\n")).matches("0123456789abcdef")


def test_a_second_line_is_accepted_as_well(tmp_path: Path) -> None:
    secret = read_secret(written(tmp_path, b"0123456789abcdef\nfedcba9876543210\n"))
    assert secret.key("x") == Secret("0123456789abcdef").key("x")
    assert secret.keys("x") == (secret.key("x"), Secret("fedcba9876543210").key("x"))
    assert [secret.matches(text) for text in ("0123456789abcdef", "fedcba9876543210", "")] == [True, True, False]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o611, 0o666])
def test_what_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(written(tmp_path, b"0123456789abcdef\n", mode))


@pytest.mark.parametrize(
    ("mode", "owner", "uid", "refused"),
    [
        (0o600, 1000, 1000, False),
        (0o440, 0, 10001, False),  # a Secret that Kubernetes mounts for the group of a pod
        (0o444, 0, 10001, True),
        (0o460, 0, 10001, True),
        (0o440, 0, 0, True),  # we are root, so the group is for others
        (0o440, 1000, 10001, True),
        (0o640, 10001, 10001, True),
    ],
)
def test_only_root_may_give_a_file_to_our_group(mode: int, owner: int, uid: int, refused: bool) -> None:
    status = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owner, 10001, 17, 0, 0, 0))
    assert others_may_open(status, uid) is refused


@pytest.mark.parametrize("content", [b"", b"\n", b"short\n", b"two words of text\n", b"\xff" * 20, b"x" * 1025])
def test_what_is_no_secret_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"must hold one line .* `paceline token FILE` makes one") as caught:
        read_secret(written(tmp_path, content))
    assert "two words" not in str(caught.value)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path, message in ((pipe, "not a regular"), (tmp_path, "not a regular"), (tmp_path / "gone", "No such file")):
        with pytest.raises(ConfigError, match=message):
            read_secret(str(path))


def test_no_file_is_no_secret() -> None:
    assert not read_secret("")


def test_only_the_same_text_matches() -> None:
    secret = Secret("0123456789abcdef")
    assert secret.matches("0123456789abcdef")
    assert not any(map(secret.matches, ("", "0123456789abcde", "0123456789abcdefg", "0123456789ABCDEF", "ä", "\udcff")))


def test_each_purpose_has_a_key_of_its_own() -> None:
    keys = {Secret(text).key(purpose) for text in ("0123456789abcdef", "fedcba9876543210") for purpose in ("a", "b")}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {32}
    assert Secret("0123456789abcdef").key("a") == Secret("0123456789abcdef").key("a")


def test_it_does_not_show_itself() -> None:
    secret = Secret("0123456789abcdef")
    assert "0123" not in f"{secret!r} {secret} {[secret]}"
