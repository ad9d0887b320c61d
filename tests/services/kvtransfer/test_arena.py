"""The arena file: how it is created, mapped, removed, and cleaned up after its service was killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.turns import PAGE_BYTES
from paceline.services.common.shared_memory import map_arena
from paceline.services.kvtransfer.arena import Arena, check_room, remove_stale_arenas

SIZE = 1 << 20


def arenas(folder: Path) -> list[Path]:
    return sorted(folder.glob("paceline-*.arena"))


def test_an_arena_is_private_and_has_all_its_memory_from_the_start(tmp_path: Path) -> None:
    arena = Arena(tmp_path, SIZE)
    status = arena.path.stat()
    assert arenas(tmp_path) == [arena.path]
    assert arena.path.name.startswith(f"paceline-{os.getuid()}-")
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == SIZE + PAGE_BYTES <= status.st_blocks * 512
    arena.close()
    assert arenas(tmp_path) == []


def test_two_workers_see_the_same_bytes_even_after_the_service(tmp_path: Path) -> None:
    arena = Arena(tmp_path, SIZE)
    with map_arena(arena.path, SIZE) as one, map_arena(arena.path, SIZE) as other:
        one[SIZE - 4 : SIZE] = b"last"
        assert other[SIZE - 4 : SIZE] == b"last"
        assert other[SIZE:] == bytes(PAGE_BYTES)
        arena.close()
        other[:5] = b"first"
        assert one[:5] == b"first"


def test_more_than_there_is_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path} has only [\d,]+ MiB free; lower it with --kv-memory"):
        Arena(tmp_path, 1 << 60)
    assert arenas(tmp_path) == []


def test_more_than_the_machine_can_spare_names_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.services.kvtransfer.arena.available_memory", lambda: 3 << 20)
    check_room(tmp_path, 3 << 20)
    with pytest.raises(ConfigError, match=r"needs 4 MiB and this machine has only 3 MiB free.*--kv-memory"):
        check_room(tmp_path, 4 << 20)


def test_memory_that_is_gone_between_the_check_and_the_taking_is_told(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from paceline.services.kvtransfer.arena import Arena\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({SIZE // 2}, {SIZE // 2}))\n"
        f"Arena(Path(sys.argv[1]), {SIZE})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert f"ConfigError: cannot make an arena of 1 MiB in {tmp_path} (" in done.stderr
    assert done.stderr.endswith("lower it with --kv-memory\n")
    assert arenas(tmp_path) == []


def test_a_folder_that_is_not_there_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--arena-dir"):
        Arena(tmp_path / "absent", SIZE)


def test_the_arena_of_a_killed_service_is_removed_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from paceline.services.kvtransfer.arena import Arena\n"
        f"arena = Arena(Path(sys.argv[1]), {SIZE})\n"
        "print(arena.path, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        path = Path(service.stdout.readline().strip())
        assert remove_stale_arenas(tmp_path) == 0
        assert path.exists()
        service.send_signal(signal.SIGKILL)
        service.wait(timeout=30)
    assert arenas(tmp_path) == [path]
    living = Arena(tmp_path, SIZE)
    assert remove_stale_arenas(tmp_path) == 1
    assert arenas(tmp_path) == [living.path]
    living.close()


def test_an_arena_that_a_worker_maps_is_not_stale_and_its_owner_finds_it(tmp_path: Path) -> None:
    arena = Arena(tmp_path, SIZE, "host")
    with map_arena(arena.path, SIZE) as memory:
        memory[:5] = b"first"
        assert Arena.left_by(tmp_path, "host") is None
        os.close(arena._descriptor)  # as if the service was killed
        assert remove_stale_arenas(tmp_path) == 0
        assert Arena.left_by(tmp_path, "another host") is None
        found = Arena.left_by(tmp_path, "host")
        assert found is not None
        assert (found.path, found.size) == (arena.path, SIZE)
        assert Arena.left_by(tmp_path, "host") is None
        os.close(found._descriptor)
    assert remove_stale_arenas(tmp_path) == 1
    assert arenas(tmp_path) == []


def test_a_sweep_touches_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    others = [target, tmp_path / f"paceline-{os.getuid() + 1}-0.arena", tmp_path / f"paceline-{os.getuid()}-0.txt"]
    for path in others:
        path.write_bytes(b"data")
    link = tmp_path / f"paceline-{os.getuid()}-1.arena"
    link.symlink_to(target)
    assert remove_stale_arenas(tmp_path) == 0
    assert link.is_symlink()
    assert all(path.read_bytes() == b"data" for path in others)


@pytest.mark.parametrize("wrong", ["absent", "link", "mode", "size", "folder"])
def test_a_worker_maps_nothing_but_its_services_arena(tmp_path: Path, wrong: str) -> None:
    arena = Arena(tmp_path, SIZE)
    path, size = arena.path, SIZE
    if wrong == "absent":
        path = tmp_path / "absent"
    elif wrong == "link":
        path = tmp_path / "link"
        path.symlink_to(arena.path)
    elif wrong == "mode":
        path.chmod(0o644)
    elif wrong == "size":
        size += 4096
    else:
        path = tmp_path
    with pytest.raises(ConfigError, match=str(path)):
        map_arena(path, size)
    arena.close()
