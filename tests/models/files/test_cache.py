"""What Paceline keeps in its cache folder: it is listed, bounded and removed, but never while somebody uses it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from paceline.core.errors import ModelError
from paceline.models.files.cache import CacheEntry, cache_entries, keep_within, prune, size_limit
from paceline.models.files.content import cache_key
from paceline.models.files.folder_lease import FolderLease, lease_model
from paceline.models.loader import load_model
from paceline.models.sources.conversion import make_once
from tests.models.packed_models import CPU, Counting, packed_folders

HOUR = 3600.0


def make_entry(folder: Path, name: str, size: int, hours_ago: float) -> Path:
    """Make a conversion of this size in a cache folder, and return the model's folder."""

    def make(scratch: Path) -> None:
        model = scratch / "model"
        model.mkdir()
        for file in ("config.json", "tokenizer.json"):
            (model / file).touch()
        (model / "model.safetensors").write_bytes(bytes(size))

    key = cache_key(name, name)
    model = make_once(key, name, folder, lambda _: None, make, lambda target: target.is_dir())
    set_age(model, hours_ago)
    return model


def set_age(folder: Path, hours: float) -> None:
    os.utime(folder, (time.time() - hours * HOUR,) * 2)


def everything(entry: CacheEntry, left: int) -> bool:
    return True


def names(entries: list[CacheEntry]) -> list[str]:
    return [entry.model for entry in entries]


def test_conversions_and_packed_weights_are_listed_and_nothing_else(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    cache = tmp_path / "cache"
    model = make_entry(cache, "small", 5000, 1)
    load_model(tmp_path, torch.float32, Counting(), CPU, cache / "packed")
    (packed,) = packed_folders(cache / "packed")
    (cache / "digests").mkdir()
    (cache / "store.db").write_bytes(b"responses")
    (cache / "own-model").mkdir()
    (cache / "own-model" / "config.json").touch()
    (cache / "small").symlink_to(model)
    first, second = cache_entries(cache)
    assert (first.kind, first.model, first.path, first.size) == ("conversion", "small", model.parent, 5000)
    assert (second.kind, second.model, second.path) == ("packed weights", tmp_path.name, packed)
    assert second.size == sum(file.stat().st_size for file in packed.iterdir())
    assert first.last_use == pytest.approx(time.time() - HOUR, abs=60)
    prune(cache, everything)
    assert {path.name for path in cache.iterdir() if path.suffix != ".lock"} == {
        "digests",
        "store.db",
        "own-model",
        "packed",
    }


def test_a_cache_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert (cache_entries(tmp_path / "cache"), keep_within(tmp_path / "cache", "auto")) == ([], [])


def test_the_least_recently_used_go_until_the_rest_fits(tmp_path: Path) -> None:
    for name, hours in (("old", 9), ("older", 20), ("new", 2)):
        make_entry(tmp_path, name, 1 << 20, hours)
    assert names(keep_within(tmp_path, "2MiB")) == ["older"]
    assert names(keep_within(tmp_path, "2MiB")) == []
    assert names(cache_entries(tmp_path)) == ["old", "new"]


def test_what_was_used_in_the_last_minutes_stays(tmp_path: Path) -> None:
    make_entry(tmp_path, "starting", 1 << 20, 0)
    assert keep_within(tmp_path, "1KiB") == []
    assert names(prune(tmp_path, everything)) == ["starting"]


def test_the_default_limit_is_the_same_before_and_after_something_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 70
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100 - free, free))  # type: ignore[attr-defined]
    assert size_limit("auto", tmp_path, 10) == 40
    free = 20
    assert size_limit("auto", tmp_path, 60) == 40


def test_a_leased_conversion_stays_and_counts_as_used_until_then(tmp_path: Path) -> None:
    model = make_entry(tmp_path, "served", 1 << 20, 50)
    lease = lease_model(model)
    assert [entry.in_use for entry in cache_entries(tmp_path)] == [True]
    assert prune(tmp_path, everything) == []
    lease.close()
    (entry,) = cache_entries(tmp_path)
    assert not entry.in_use
    assert entry.last_use == pytest.approx(time.time(), abs=60)
    prune(tmp_path, everything)
    assert not model.parent.exists()
    with pytest.raises(ModelError, match="served has just been removed; start again"):
        lease_model(model)


def test_packed_weights_are_in_use_as_long_as_a_model_maps_them(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    packed = tmp_path / "packed"
    model = load_model(tmp_path, torch.float32, Counting(), CPU, packed)
    assert prune(tmp_path, everything) == []
    assert [entry.in_use for entry in cache_entries(tmp_path)] == [True]
    del model
    assert [entry.in_use for entry in cache_entries(tmp_path)] == [False]
    assert [entry.kind for entry in prune(tmp_path, everything)] == ["packed weights"]
    assert packed_folders(packed) == []


def test_forms_in_use_are_no_room_for_another_one(tmp_path: Path, save_llama: Any) -> None:
    save_llama()
    packed, models = tmp_path / "packed", []
    for library in range(3):
        kernels = Counting()
        kernels.packing = f"native-{library}"
        models.append(load_model(tmp_path, torch.float32, kernels, CPU, packed))
    assert len(packed_folders(packed)) == 3


def test_a_lease_ends_with_its_process(tmp_path: Path) -> None:
    model = make_entry(tmp_path, "served", 10, 50)
    code = (
        "import sys, time; from pathlib import Path; from paceline.models.files.folder_lease import FolderLease\n"
        "lease = FolderLease(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(model)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert prune(tmp_path, everything) == []
        process.kill()
    assert names(prune(tmp_path, everything)) == ["served"]


def test_stacks_that_start_together_remove_each_entry_once_and_none_in_use(tmp_path: Path) -> None:
    for number in range(40):
        make_entry(tmp_path, f"model{number}", 1000, 50)
    used = make_entry(tmp_path, "used", 1000, 90)

    def start(_: int) -> FolderLease:
        lease = FolderLease(used)
        keep_within(tmp_path, "1KiB")
        return lease

    with ThreadPoolExecutor(4) as threads:
        leases = list(threads.map(start, range(4)))
    assert [(entry.model, entry.in_use) for entry in cache_entries(tmp_path)] == [("used", True)]
    assert [path for path in tmp_path.iterdir() if ".removed-" in path.name] == []
    del leases


def test_no_lease_is_given_of_a_folder_that_is_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, real = make_entry(tmp_path, "small", 10, 50), fcntl.flock

    def be_late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        assert names(prune(tmp_path, everything)) == ["small"]
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", be_late)
    with pytest.raises(ModelError, match="small has just been removed; start again"):
        lease_model(model)


def test_no_lease_is_given_of_a_folder_that_another_one_has_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, real = make_entry(tmp_path, "small", 10, 50), fcntl.flock

    def be_late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        prune(tmp_path, everything)
        make_entry(tmp_path, "small", 10, 50)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", be_late)
    with pytest.raises(FileNotFoundError):
        FolderLease(model)
    FolderLease(model).close()


def test_a_crash_while_an_entry_is_removed_leaves_no_half_of_it_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_entry(tmp_path, "small", 5000, 50)

    def be_killed(path: Path) -> None:
        (path / "small" / "config.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as crashing:
        crashing.setattr(shutil, "rmtree", be_killed)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, everything)
    assert not model.parent.exists()
    (left,) = cache_entries(tmp_path)
    assert (left.kind, left.model, left.size) == ("unfinished", "small", 5000)
    make_entry(tmp_path, "small", 5000, 50)
    assert [entry.kind for entry in keep_within(tmp_path, "1MiB")] == ["unfinished"]
    assert [entry.kind for entry in cache_entries(tmp_path)] == ["conversion"]


@pytest.mark.parametrize("place", [".{}.tmp-abcd", "packed/{}-native.tmp"], ids=["conversion", "packed weights"])
def test_what_a_killed_process_was_making_is_removed_but_not_what_one_is_making(tmp_path: Path, place: str) -> None:
    key = cache_key("small", "inputs")
    left = tmp_path / place.format(key)
    left.mkdir(parents=True)
    (left / "file").write_bytes(bytes(100))
    with FileLock(left.parent / f".{key}.lock"):
        assert [entry.in_use for entry in cache_entries(tmp_path)] == [True]
        assert prune(tmp_path, everything) == []
    assert [(entry.model, entry.size) for entry in prune(tmp_path, everything)] == [("small", 100)]
    assert not left.exists()


def test_the_link_of_a_bundled_model_goes_with_its_conversion(tmp_path: Path) -> None:
    model = make_entry(tmp_path, "small", 10, 50)
    (tmp_path / "small").symlink_to(model)
    (tmp_path / "elsewhere").symlink_to("/nowhere")
    prune(tmp_path, everything)
    assert [path.name for path in tmp_path.iterdir() if path.is_symlink()] == ["elsewhere"]


def test_a_cache_that_cannot_be_written_is_named_and_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_entry(tmp_path, "small", 10, 50)

    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", refuse)  # a user who may do everything runs tests, too
    with pytest.raises(ModelError, match=r"cannot remove .*/small-\w+: Permission denied; remove it by hand"):
        prune(tmp_path, everything)
    assert (model / "config.json").exists()


def test_a_conversion_in_a_folder_that_cannot_be_written_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_entry(tmp_path, "small", 10, 50)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    found = make_once(cache_key("small", "small"), "small", tmp_path, print, refuse, lambda target: target.is_dir())
    assert found == model
    lease_model(found).close()
