"""Workers that read each other's pools. A reader gets exactly the named block, or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.core.kv_layout import GroupShape, KVLayout, make_layout
from paceline.engine.pool_directory import BlockCopy
from paceline.kernels.block_copies import BlockCopies, Copy
from paceline.services.kvtransfer.arena import remove_stale_arenas
from paceline.services.worker import shared_pools
from paceline.services.worker.shared_pools import SharedPool, SharedPools

pytestmark = pytest.mark.slow

LAYOUT = make_layout((GroupShape("full", (0,), 1, 16),), 4, "test")
ELEMENTS = LAYOUT.slot_bytes // 4
SLOTS, ARENA_SLOTS = 6, 20


def move(pool_slot: int, arena_slot: int, name: int, group: int = 0) -> BlockCopy:
    return BlockCopy(pool_slot, arena_slot, group, name.to_bytes(16, "big"))


def content(name: int) -> Tensor:
    return torch.full((ELEMENTS,), float(name))


class Worker:
    """A worker's pool, and its access to the pools of other workers."""

    def __init__(self, folder: Path, layout: KVLayout = LAYOUT, copies: type[BlockCopies] = BlockCopies) -> None:
        self.arena = folder / f"paceline-{os.getuid()}-tag-0.arena"
        self.shared = SharedPool(self.arena, ARENA_SLOTS, layout, SLOTS, torch.float32, torch.device("cpu"))
        self.blocks = self.shared.pool.view(SLOTS, ELEMENTS)
        self.copies = copies(self.blocks, torch.zeros(ARENA_SLOTS, ELEMENTS))
        self.others = SharedPools(self.shared, self.copies)

    def publish(self, *moves: BlockCopy) -> None:
        for own in moves:
            self.blocks[own.pool_slot] = content(int.from_bytes(own.digest, "big"))
        self.shared.directory.publish(moves)

    def close(self) -> None:
        self.others.close()
        self.shared.close()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    monkeypatch.setattr(shared_pools, "LOOK_SECONDS", 0)
    workers: list[Worker] = []

    def make(**options: object) -> Worker:
        workers.append(Worker(tmp_path, **options))  # type: ignore[arg-type]
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()
    assert not list(tmp_path.iterdir())


def test_blocks_come_by_their_names_and_what_is_not_there_is_left(start: Callable[..., Worker]) -> None:
    writer, reader, third = start(), start(), start()
    writer.publish(move(2, 7, 70), move(0, 8, 80), move(1, 9, 90))
    third.publish(move(5, 11, 110))
    wanted = [move(4, 9, 90), move(1, 7, 71), move(2, 8, 80, group=1), move(3, 7, 70), move(0, 10, 0), move(5, 11, 110)]
    assert reader.others.load(wanted) == [wanted[1], wanted[2], wanted[4]]
    for slot, name in {4: 90, 3: 70, 5: 110, 0: 0, 1: 0, 2: 0}.items():
        assert torch.equal(reader.blocks[slot], content(name))


def test_what_was_withdrawn_or_told_anew_is_not_read_under_its_old_name(start: Callable[..., Worker]) -> None:
    writer, reader = start(), start()
    writer.publish(move(2, 7, 70), move(0, 8, 80))
    writer.shared.directory.withdraw([2, 3])
    assert reader.others.load([move(0, 7, 70)])
    writer.publish(move(0, 7, 75))  # overwrites pool slot 0, which was published for arena slot 8
    assert reader.others.load([move(0, 8, 80)])
    assert reader.others.load([move(0, 7, 70)])
    assert reader.others.load([move(0, 7, 75)]) == []
    writer.publish(move(1, 7, 76))
    writer.shared.directory.withdraw([0])  # arena slot 7 is published with pool slot 1 now
    assert reader.others.load([move(0, 7, 76)]) == []


def test_what_changes_while_it_is_copied_counts_for_nothing(start: Callable[..., Worker]) -> None:
    writer = start()

    class Overtaken(BlockCopies):
        """While the first of two blocks is copied, its slot gets other content, and then the old content again."""

        def load_from(self, pool: Tensor, slots: Sequence[int], pool_slots: Sequence[int]) -> Copy:
            writer.shared.directory.withdraw([2])
            writer.publish(move(2, 7, 70))
            return super().load_from(pool, slots, pool_slots)

    reader = start(copies=Overtaken)
    writer.publish(move(2, 7, 70), move(3, 8, 80))
    assert reader.others.load([move(0, 7, 70), move(1, 8, 80)]) == [move(0, 7, 70)]


def test_a_pool_that_ends_while_it_is_read_counts_for_nothing(start: Callable[..., Worker]) -> None:
    writer = start()

    class Left(BlockCopies):
        def load_from(self, pool: Tensor, slots: Sequence[int], pool_slots: Sequence[int]) -> Copy:
            writer.close()
            return super().load_from(pool, slots, pool_slots)

    reader = start(copies=Left)
    writer.publish(move(2, 7, 70))
    assert reader.others.load([move(0, 7, 70)]) == [move(0, 7, 70)]
    assert reader.others.load([move(0, 7, 70)]) == [move(0, 7, 70)]


@pytest.mark.parametrize("what", ["layout", "mode", "page", "size", "device"])
def test_what_does_not_fit_is_left_alone(what: str, start: Callable[..., Worker]) -> None:
    writer = start(layout=replace(LAYOUT, fingerprint="other")) if what == "layout" else start()
    writer.publish(move(2, 7, 70))
    if what == "mode":
        writer.shared.path.chmod(0o644)
    elif what in ("page", "size"):
        page = writer.shared.path.read_bytes()[-4096:]
        with writer.shared.path.open("r+b") as file:
            file.seek(0 if what == "size" else -4096, 2)
            file.write(page if what == "size" else b"\xff" * 4096)
    reader = start()
    if what == "device":
        reader.shared.about.device = "GPU-1"
        reader.others = SharedPools(reader.shared, reader.copies)
    assert reader.others.load([move(0, 7, 70)]) == [move(0, 7, 70)]
    assert not reader.blocks.any()


OTHER_PROCESS = """
import sys, pathlib
from tests.services.worker.test_shared_pools import Worker, content, move
worker = Worker(pathlib.Path(sys.argv[1]))
worker.publish(*(move(slot, slot, slot + 1) for slot in range(6)))
print("ready", flush=True)
name = 6
while sys.argv[2] == "writes":
    for slot in range(1, 6):
        name += 1
        worker.shared.directory.withdraw([slot])
        worker.publish(move(slot, slot, 1 + name % 12))
sys.stdin.read()
"""


def other_process(folder: Path, does: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OTHER_PROCESS, str(folder), does]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_writer_is_never_in_a_readers_way_nor_the_other_way_round(
    tmp_path: Path, start: Callable[..., Worker]
) -> None:
    reader, came = start(), 0
    with other_process(tmp_path, "writes") as process:
        for round_ in range(2000):
            asked = [move(slot, slot, 1 + (round_ + slot) % 12) for slot in range(6)]
            left = reader.others.load(asked)
            for own in set(asked) - set(left):
                came += 1
                assert torch.equal(reader.blocks[own.pool_slot], content(int.from_bytes(own.digest, "big")))
        assert remove_stale_arenas(tmp_path) == 0
        process.kill()
    assert came > 100
    assert remove_stale_arenas(tmp_path) == 1


def test_what_a_killed_worker_left_is_not_read_and_is_removed(tmp_path: Path, start: Callable[..., Worker]) -> None:
    with other_process(tmp_path, "waits") as process:
        early, late = start(), start()
        assert early.others.load([move(0, 3, 4)]) == []
        process.kill()
        process.wait()
        assert early.others.load([move(1, 3, 4)]) == [move(1, 3, 4)]
        assert late.others.load([move(0, 3, 4)]) == [move(0, 3, 4)]
    assert set(tmp_path.iterdir()) == {early.shared.path, late.shared.path}


def test_who_has_nothing_to_load_lets_go_of_the_dead_too(tmp_path: Path, start: Callable[..., Worker]) -> None:
    with other_process(tmp_path, "waits") as process:
        idle = start()
        assert len(idle.others._known) == 1
        process.kill()
        process.wait()
        idle.others.drop_ended()
        assert idle.others._known == {}
    assert list(tmp_path.iterdir()) == [idle.shared.path]


def test_before_memory_is_taken_that_of_the_dead_is_freed(tmp_path: Path, start: Callable[..., Worker]) -> None:
    living = start()
    with other_process(tmp_path, "waits") as process:
        process.kill()
        process.wait()
        assert len(list(tmp_path.iterdir())) == 2
        shared_pools.remove_ended(living.arena)
        assert list(tmp_path.iterdir()) == [living.shared.path]
