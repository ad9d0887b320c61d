from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from paceline.services.serve.private_folder import private_folder


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_this_user_may_read_it_and_it_goes() -> None:
    with private_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_an_old_folder_in_use_is_left_alone() -> None:
    with private_folder() as first:
        os.utime(first, (0, 0))
        with private_folder():
            assert first.exists()


def test_an_old_folder_of_nobody_is_removed(parent: Path) -> None:
    stale = parent / "paceline-stack-1"
    stale.mkdir()
    (stale / "stack.toml").write_text("")
    os.utime(stale, (0, 0))
    with private_folder():
        assert not stale.exists()


def test_a_young_folder_and_other_names_are_left_alone(parent: Path) -> None:
    young, other = parent / "paceline-stack-2", parent / "paceline-other"
    young.mkdir()
    other.mkdir()
    os.utime(other, (0, 0))
    with private_folder():
        assert young.exists()
        assert other.exists()
