"""Each worker gets a GPU of its own, as long as there are enough."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.core.config import ServeConfig
from paceline.services.serve.gpus import GpuPlaces, default_budget, visible_gpus
from paceline.services.serve.processes import Processes
from paceline.services.serve.worker_fleet import ServedWorker

WORKER = """
import os, sys
ready = int(next(word for word in sys.argv if word.startswith("--ready-fd=")).partition("=")[2])
os.write(ready, os.environ.get("CUDA_VISIBLE_DEVICES", "all").encode() + b"\\n")
sys.stdin.read() or __import__("time").sleep(60)
"""


def test_the_environment_names_them_or_the_driver_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234, 3,")
    assert visible_gpus(tmp_path) == ["GPU-1234", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus(tmp_path) == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for bus in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / bus).mkdir()
    assert visible_gpus(tmp_path) == ["0", "1"]
    assert visible_gpus(tmp_path / "no driver") == []


def test_the_one_with_the_fewest_workers_is_next() -> None:
    places = GpuPlaces(["a", "b"])
    assert [places.take() for _ in range(3)] == ["a", "b", "a"]
    assert (places.is_shared("a"), places.is_shared("b")) == (True, False)
    places.give_back("a")
    places.give_back("a")
    assert places.take() == "a"
    assert GpuPlaces([]).take() is None


@pytest.mark.parametrize(
    ("gpus", "options", "budget"),
    [
        (8, {}, 8),
        (1, {}, 2),  # the first workers share it
        (2, {"prefill": 2, "decode": 2, "encode": 1}, 5),
        (2, {"least_decode": 4}, 5),
        (4, {"prefill_devices": 2, "prefill": 2}, 5),
    ],
)
def test_the_planner_has_the_gpus_and_room_for_the_workers_that_the_user_wants(
    gpus: int, options: dict[str, int], budget: int
) -> None:
    assert default_budget(ServeConfig.model_validate({"model": "m", **options}), gpus) == budget


def test_the_budget_of_pool_workers_does_not_count_others() -> None:
    config = ServeConfig(model="m", prefill=5, pool=2, pool_devices=2)
    assert default_budget(config, 1, ("pool",)) == 4


async def test_workers_see_their_own_only_and_a_restarted_one_gets_the_free_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # a machine with GPUs may have it

    def command(role: str, *arguments: str) -> Sequence[str]:
        return [sys.executable, "-c", WORKER, *arguments]

    processes = Processes(command, 0.0, ["0", "1"])
    workers = [processes.worker(ServedWorker(f"decode-{number}", "decode"), has_gpu=True) for number in range(3)]
    cpu = processes.worker(ServedWorker("prefill-0", "prefill"))
    children = [await worker.start() for worker in (*workers, cpu)]
    try:
        assert [await worker.ready() for worker in (*workers, cpu)] == ["0", "1", "0", "all"]
        assert "decode-2 shares GPU 0" in capsys.readouterr().err
        await processes.stop(workers[0])
        await processes.stop(workers[2])
        await workers[0].start()
        assert await workers[0].ready() == "0"
    finally:
        for worker in (*workers, cpu):
            await processes.stop(worker)
    assert all(child.exited.done() for child in children)
