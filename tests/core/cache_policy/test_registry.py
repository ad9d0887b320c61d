from pathlib import Path

import pytest

from paceline.core.cache_policy.registry import POLICIES, find_policy
from paceline.core.config import KVTransferConfig, ServeConfig
from paceline.core.errors import ConfigError
from tests.core.cache_policy.policies import MostRecent


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **policies: str) -> None:
    """Install a distribution whose entry points name these objects as policies."""
    about = folder / "others-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    lines = [f"{name} = {where}\n" for name, where in policies.items()]
    (about / "entry_points.txt").write_text("[paceline.cache_policies]\n" + "".join(lines))
    monkeypatch.syspath_prepend(str(folder))


def test_ours_are_found_by_name() -> None:
    assert {name: find_policy(name) for name in POLICIES} == POLICIES


def test_the_default_is_one_of_ours() -> None:
    assert KVTransferConfig().cache_policy == ServeConfig().cache_policy
    assert KVTransferConfig().cache_policy in POLICIES


def test_others_come_through_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, newest="tests.core.cache_policy.policies:MostRecent")
    assert find_policy("newest") is MostRecent


def test_others_cannot_replace_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, lru="tests.core.cache_policy.policies:MostRecent")
    assert find_policy("lru") is POLICIES["lru"]


def test_an_unknown_name_is_told_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, newest="tests.core.cache_policy.policies:MostRecent")
    with pytest.raises(ConfigError, match=r"'lur'.*forecast, arc, lru, newest"):
        find_policy("lur")


@pytest.mark.parametrize(
    ("where", "why"),
    [("no.such.module:X", "cannot be loaded"), ("tests.core.cache_policy.policies:name", "no subclass")],
)
def test_what_is_no_policy_is_refused(where: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, bad=where)
    with pytest.raises(ConfigError, match=f"'bad'.*{why}"):
        find_policy("bad")
