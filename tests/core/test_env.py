import subprocess
from pathlib import Path

import pytest

from paceline.core import env


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"PACELINE_CACHE": "/own", "XDG_CACHE_HOME": "/xdg", "HOME": "/me"}, "/own"),
        ({"PACELINE_CACHE": "~/own", "HOME": "/me"}, "/me/own"),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/me"}, "/xdg/paceline"),
        ({"PACELINE_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/me"}, "/me/.cache/paceline"),
    ],
)
def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str) -> None:
    for name in ("PACELINE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert env.default_cache_dir() == Path(folder)


@pytest.mark.parametrize(("value", "keys"), [("", ()), (" , ", ()), ("one", ("one",)), (" one, two ,", ("one", "two"))])
def test_keys(monkeypatch: pytest.MonkeyPatch, value: str, keys: tuple[str, ...]) -> None:
    for variable, read in (("PACELINE_API_KEY", env.api_keys), ("PACELINE_ADMIN_KEY", env.admin_keys)):
        monkeypatch.setenv(variable, value)
        assert read() == keys
        monkeypatch.delenv(variable)
        assert read() == ()


def test_traces_go_where_the_standard_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert not env.exports_traces()
    for name in names:
        with monkeypatch.context() as patch:
            patch.setenv(name, "http://collector:4318")
            assert env.exports_traces()


def test_a_child_gets_ours_and_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    child = env.child_environment(OURS="2", THEIRS="3")
    assert (child["OURS"], child["THEIRS"]) == ("2", "3")
    assert env.child_environment()["OURS"] == "1"


def test_the_user_s_own_wait_policy_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    env.share_cores()
    assert env.child_environment()["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    env.share_cores()
    assert env.child_environment()["OMP_WAIT_POLICY"] == "PASSIVE"


def test_children_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """A folder from which a user starts a stack may have files such as redis.py, and belong to somebody else."""
    for name in ("paceline.py", "redis.py", "json.py"):
        (tmp_path / name).write_text("raise SystemExit(3)")
    done = subprocess.run(env.child_command("version"), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
