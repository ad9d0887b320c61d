"""Keys of options and of a file, which may change and may be wrong."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.services.common.secret import new_key
from paceline.services.gateway.http.access import keys as key_module
from paceline.services.gateway.http.access.callers import Caller
from paceline.services.gateway.http.access.keys import AccessBook, KeyLimits
from tests.services.gateway.conftest import eventually

CLEAR = "the-key-of-alice"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def written(folder: Path, text: str, mode: int = 0o600) -> str:
    file = folder / "keys.toml"
    new = folder / "new.toml"
    new.touch(mode)
    new.chmod(mode)
    new.write_text(text)
    new.replace(file)
    return str(file)


def test_keys_of_options_have_numbers() -> None:
    keys = AccessBook(["one", "two", "one"], ["root"])
    callers = [keys.caller(digest(key)) for key in ("one", "two", "root")]
    assert callers == [
        Caller("key-1", digest("one"), False),
        Caller("key-2", digest("two"), False),
        Caller("admin-1", digest("root"), True),
    ]
    assert (keys.has_clients, keys.has_admins) == (True, True)
    assert keys.find(["", "wrong"]) is None
    found = keys.find(["one", "root"])
    assert found is not None
    assert found.name == "admin-1"


def test_without_keys_everybody_is_anyone() -> None:
    keys = AccessBook()
    assert (keys.has_clients, keys.has_admins, keys.caller("")) == (False, False, Caller("", "", False))
    assert AccessBook(["one"]).caller("") is None
    assert AccessBook(admin_keys=["one"]).caller("") == Caller("", "", False)
    assert keys.caller(digest("gone")) is None


def test_a_file_names_keys_with_roles_and_limits(tmp_path: Path) -> None:
    text = f"""
        [alice]
        key = "{CLEAR}"
        priority = 10
        class = "background"
        requests-per-minute = 60
        tokens_per_minute = 1_000
        max_concurrent = 8
        [ops]
        sha256 = "{digest("root").upper()}"
        role = "admin"
    """
    keys = AccessBook(["one"], file=written(tmp_path, text))
    alice = keys.key(digest(CLEAR))
    assert alice is not None
    assert alice.limits == KeyLimits(60, 1000, 8)
    assert keys.caller(digest(CLEAR)) == Caller("alice", digest(CLEAR), False, 10, "background")
    assert keys.caller(digest("root")) == Caller("ops", digest("root"), True)
    assert keys.caller(digest("one")) == Caller("key-1", digest("one"), False)


def test_a_new_key_is_accepted_by_its_lines(tmp_path: Path) -> None:
    key, _, lines = new_key("a.b").partition("\n\n")
    assert key not in lines
    assert new_key("a.b") != new_key("a.b")
    found = AccessBook(file=written(tmp_path, lines)).find([key])
    assert found is not None
    assert (found.name, found.role) == ("a.b", "client")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key"),
        ("# keys will follow", "has no key"),
        ("[alice", "is not valid TOML"),
        (f'alice = "{CLEAR}"', r"alice must be the heading of a key, \[alice\]"),
        ("[alice]", r"\[alice\] needs either key or sha256"),
        (f'[alice]\nkey = "{CLEAR}"\nsha256 = "{"0" * 64}"', "needs either key or sha256"),
        (f'[alice]\nkey = "{CLEAR} "', r"\[alice\] key: String should match"),
        ('[alice]\nsha256 = "123"', r"\[alice\] sha256: String should match"),
        (f'[alice]\nkey = "{CLEAR}"\nrole = "boss"', "role: Input should be 'client' or 'admin'"),
        (f'[alice]\nkey = "{CLEAR}"\nmax_concurrent = 0', "max_concurrent: Input should be greater than"),
        (f'[alice]\nkey = "{CLEAR}"\nrpm = 1', "rpm: Extra inputs are not permitted"),
        (f'[alice]\nkey = "{CLEAR}"\n[bob]\nkey = "{CLEAR}"', "the keys 'alice' and 'bob' are the same"),
        (f'[alice]\nkey = "{CLEAR}"\n[bob]\nkey = "given"', "the keys 'key-1' and 'bob' are the same"),
        (
            f'[alice]\nkey = "{CLEAR}"\nclass = "gold"',
            "'alice' has the class 'gold', which --classes-file lacks",
        ),
        (f'[key-1]\nkey = "{CLEAR}"', "two keys have the name 'key-1'"),
    ],
)
def test_a_wrong_file_is_refused_without_showing_a_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        AccessBook(["given"], file=written(tmp_path, text))
    assert CLEAR not in str(caught.value)
    assert digest(CLEAR) not in str(caught.value)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"other users may open --api-keys-file .*chmod 600"):
        AccessBook(file=written(tmp_path, "", 0o640))


async def test_a_file_that_changes_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_module, "LOOK_SECONDS", 0.01)
    keys = AccessBook(file=written(tmp_path, f'[alice]\nkey = "{CLEAR}"'))
    watch = asyncio.create_task(keys.watch())
    with caplog.at_level(logging.WARNING, "paceline"):
        written(tmp_path, '[alice]\nkey = "another"\n[bob]\nkey = "bobs"')
        await eventually(lambda: keys.find(["bobs"]) is not None)
        assert keys.find([CLEAR]) is None
        written(tmp_path, f'[bob]\nkey = "{CLEAR}"\npriority = "high"')
        await eventually(lambda: "the keys stay as they were" in caplog.text)
        assert keys.find(["bobs"]) is not None
        (tmp_path / "keys.toml").unlink()
        await eventually(lambda: "No such file" in caplog.text)
        assert keys.find(["bobs"]) is not None
        written(tmp_path, f'[alice]\nkey = "{CLEAR}"')
        await eventually(lambda: keys.find([CLEAR]) is not None)
    assert CLEAR not in caplog.text
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch


async def test_a_file_that_changes_never_opens_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, "LOOK_SECONDS", 0.01)
    keys = AccessBook(file=written(tmp_path, f'[alice]\nkey = "{CLEAR}"\n[ops]\nkey = "root"\nrole = "admin"'))
    watch = asyncio.create_task(keys.watch())
    written(tmp_path, '[ops]\nkey = "root"\nrole = "admin"')
    await eventually(lambda: keys.find([CLEAR]) is None)
    assert keys.has_clients
    assert keys.caller("") is None
    written(tmp_path, '[bob]\nkey = "bobs"')
    await eventually(lambda: keys.find(["root"]) is None)
    assert keys.has_admins
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
