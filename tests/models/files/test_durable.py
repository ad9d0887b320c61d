"""What has its final name is on the disk as a whole, so a power cut leaves no part of it under this name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.models.files.durable import rename_durably, write_durably


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """The files and folders that are written to the disk and renamed, in the order of these operations."""
    found: list[tuple[str, Path]] = []
    fsync, replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        found.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        found.append(("rename", self))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    return found


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, events: list[tuple[str, Path]]) -> None:
    made = tmp_path / "made"
    (made / "inner").mkdir(parents=True)
    files = [made / "one", made / "inner" / "two"]
    for file in files:
        file.write_text("content")
    (made / "link").symlink_to("one")
    (made / "nowhere").symlink_to("missing")
    rename_durably(made, tmp_path / "name")
    before, (after,) = events[:-2], events[-1:]
    assert sorted(before) == sorted(("sync", path) for path in (*files, made, made / "inner"))
    assert events[-2] == ("rename", made)
    assert after == ("sync", tmp_path)
    assert (tmp_path / "name" / "inner" / "two").read_text() == "content"


def test_a_text_is_replaced_as_a_whole(tmp_path: Path, events: list[tuple[str, Path]]) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    write_durably(file, "new")
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o644
    assert [what for what, _ in events] == ["sync", "rename", "sync"]
    assert events[0][1] == events[1][1] != file
    assert list(tmp_path.iterdir()) == [file]


def test_a_failed_write_leaves_the_old_text_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_durably(file, "\ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
