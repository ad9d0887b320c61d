"""The benchmark of cores."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from bench.compute.cores import busy, measure, nodes_of


def test_nodes_have_the_cores_that_this_process_may_use(tmp_path: Path) -> None:
    core, *_ = sorted(os.sched_getaffinity(0))
    for name, cores in {"node0": f"{core},5000-5002\n", "node1": "5003\n", "node2": "\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores)
    assert nodes_of(tmp_path) == {"node0": [core]}


def test_a_core_is_busy_only_meanwhile() -> None:
    core, *_ = sorted(os.sched_getaffinity(0))
    with busy(core) as pid:
        child = psutil.Process(pid)
        assert child.cpu_affinity() == [core]
    assert not child.is_running()


@pytest.mark.slow
def test_a_measurement_leaves_the_affinity_as_it_was() -> None:
    before = os.sched_getaffinity(0)
    core, *_ = sorted(before)
    assert measure([core], [core], 1, 1, "auto") > 0
    assert os.sched_getaffinity(0) == before
