"""Subfolders that are adapters: when they are complete, and when their content changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paceline.core import adapter_folder
from paceline.core.adapter_folder import find_adapters, mark_of
from tests.adapters import write_files


def write(folder: Path, alpha: int = 1) -> Path:
    write_files(folder, {"peft_type": "LORA", "lora_alpha": alpha}, {"x": torch.ones(8)})
    return folder


def test_subfolders_with_complete_adapters_are_found(tmp_path: Path) -> None:
    for name in ("b", "a", ".hidden", "..2026"):
        write(tmp_path / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "dead").symlink_to(tmp_path / "none")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe/adapter_config.json")
    found = find_adapters(tmp_path)
    assert [name for name, mark in found.items() if mark is not None] == ["a", "b", "link"]
    assert found["pipe"] is None  # its files may still come
    with pytest.raises(OSError, match="No such"):
        find_adapters(tmp_path / "none")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_half_written_folder_is_no_adapter(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a")
    content = (tmp_path / "a" / name).read_bytes()
    for size in range(len(content)):
        (tmp_path / "a" / name).write_bytes(content[:size])
        assert mark_of(tmp_path / "a") is None
    (tmp_path / "a" / name).write_bytes(content)
    assert mark_of(tmp_path / "a") is not None


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}",
        b'"x"',
        b'{"x": 5}',
        b'{"x": {}}',
        b'{"x": {"data_offsets": 5}}',
        b'{"x": {"data_offsets": [0]}}',
        b'{"x": {"data_offsets": [0, "x"]}}',
        b"[" * 20_000,
        b"\xff",
    ],
)
def test_a_damaged_folder_is_no_adapter(tmp_path: Path, header: bytes) -> None:
    write(tmp_path / "a")
    (tmp_path / "a/adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert mark_of(tmp_path / "a") is None


def test_other_content_has_another_mark(tmp_path: Path) -> None:
    marks = [mark_of(write(tmp_path / "a"))]
    assert mark_of(tmp_path / "a") == marks[0]
    for alpha in (2, 30):
        marks.append(mark_of(write(tmp_path / "a", alpha)))
    assert len(set(marks)) == 3


def test_a_volume_of_kubernetes_changes_as_a_whole(tmp_path: Path) -> None:
    """Its files are links through `..data`, which is replaced by another link."""
    versions = [write(tmp_path / "sql" / f"..2026_{number}", number) for number in (1, 2)]
    data = tmp_path / "sql" / "..data"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "sql" / name).symlink_to(Path("..data", name))
    found = []
    for version in versions:
        (tmp_path / "new").symlink_to(version.name)
        (tmp_path / "new").replace(data)
        found.append(find_adapters(tmp_path))
    assert [list(own) for own in found] == [["sql"], ["sql"]]
    assert found[0] != found[1]


def test_a_mark_has_the_place_to_which_links_lead_now(tmp_path: Path) -> None:
    write(tmp_path / "..data-1" / "sql")
    (tmp_path / "sql").symlink_to(tmp_path / "..data-1" / "sql")
    mark = find_adapters(tmp_path)["sql"]
    assert mark is not None
    assert mark[0] == str(tmp_path / "..data-1" / "sql")


def test_a_subfolder_that_is_being_written_stays(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "a/adapter_model.safetensors").write_bytes(b"")
    assert find_adapters(tmp_path) == {"a": None}


def test_files_that_have_not_changed_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a")
    known = find_adapters(tmp_path)
    monkeypatch.setattr(adapter_folder, "open_adapter_file", None)
    assert find_adapters(tmp_path, known) == known
