"""The folder of --lora-dir beside adapters that operators load and unload."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.adapters import Adapter, read_adapter
from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError, InvalidRequestError
from paceline.services.gateway.fleet import adapter_watch
from paceline.services.gateway.fleet.adapter_book import AdapterBook
from paceline.services.gateway.fleet.adapter_watch import AdapterWatch
from tests.adapters import write_files


def write(folder: Path, alpha: int = 1) -> Adapter:
    write_files(folder, {"peft_type": "LORA", "lora_alpha": alpha}, {"x": torch.ones(8)})
    return read_adapter(folder.name, str(folder))


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """The errors of the next checks by workers; without one, an adapter passes."""
    errors: list[Exception] = []

    async def check(fleet: object, name: str, folder: str) -> Adapter:
        if errors:
            raise errors.pop(0)
        return read_adapter(name, folder)

    monkeypatch.setattr(adapter_watch, "check_adapter", check)
    return errors


def watching(folder: Path, book: AdapterBook) -> AdapterWatch:
    config, fleet = GatewayConfig(enable_lora=True, lora_dir=str(folder)), Any
    return AdapterWatch(config, fleet, book, ["model"], book.put, book.remove)  # type: ignore[arg-type]


async def look(watch: AdapterWatch, folder: Path) -> None:
    for _ in range(3):
        await watch._look(folder)


async def test_what_changes_last_counts(tmp_path: Path, checks: list[Exception]) -> None:
    folder, book = tmp_path / "loras", AdapterBook({})
    first = {name: write(folder / name) for name in ("sql", "chat")}
    watch = watching(folder, book)
    await look(watch, folder)
    assert [book.find(name) for name in first] == list(first.values())
    other = write(tmp_path / "other/sql", 2)
    book.put(other)
    book.remove("chat")
    for each in (watch, watching(folder, book)):  # the second one is in a gateway that starts now
        await look(each, folder)
        assert (book.find("sql"), book.find("chat")) == (other, None)
    newer = write(folder / "chat", 3)
    shutil.rmtree(folder / "sql")
    await look(watch, folder)
    assert (book.find("sql"), book.find("chat")) == (other, newer)
    shutil.rmtree(folder / "chat")
    await look(watch, folder)
    assert (book.find("sql"), book.find("chat")) == (other, None)


async def test_a_later_gateway_follows_changes_of_subfolders(tmp_path: Path, checks: list[Exception]) -> None:
    book = AdapterBook({})
    book.put(write(tmp_path / "sql"))  # by another gateway
    newer = write(tmp_path / "sql", 2)
    await look(watching(tmp_path, book), tmp_path)
    assert book.find("sql") == newer


async def test_a_subfolder_that_is_being_written_keeps_its_name(tmp_path: Path, checks: list[Exception]) -> None:
    book = AdapterBook({})
    known = write(tmp_path / "sql")
    watch = watching(tmp_path, book)
    await look(watch, tmp_path)
    (tmp_path / "sql/adapter_model.safetensors").write_bytes(b"")
    await look(watch, tmp_path)
    assert book.find("sql") == known


async def test_a_subfolder_that_was_refused_is_tried_again(
    tmp_path: Path, checks: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    book = AdapterBook({})
    known = write(tmp_path / "sql")
    watch = watching(tmp_path, book)
    checks += [InvalidRequestError("a disk failed", "model"), BusyError("too many names")]
    await look(watch, tmp_path)
    await look(watch, tmp_path)
    assert len(checks) == 1  # not at once
    monkeypatch.setattr(adapter_watch, "RETRY_SECONDS", -1.0)
    watch._refused.clear()
    await look(watch, tmp_path)
    await look(watch, tmp_path)
    assert (book.find("sql"), checks) == (known, [])
