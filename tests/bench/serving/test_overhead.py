from __future__ import annotations

import os
import threading
import time
from collections import Counter

import pytest

from bench.serving.overhead import BESIDE, CLIENT, FORWARD, cpu_times, overhead, split, worker_stats
from paceline.core.machine import name_thread


def test_cpu_time_is_told_apart_by_thread() -> None:
    done = threading.Event()

    def compute() -> None:
        name_thread()
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        done.wait(90)

    before = cpu_times({os.getpid(): "here"})
    thread = threading.Thread(target=compute, name="engine-compute")
    thread.start()
    deadline = time.monotonic() + 60
    try:
        while (cpu_times({os.getpid(): "here"}) - before)["here", "engine-compute"] < 0.05:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        done.set()
        thread.join()
    assert ("here", "event loop") in before


def test_all_that_is_not_the_forward_pass_is_overhead_but_the_client() -> None:
    threads = Counter(
        {
            ("decode-0", "engine-compute"): 50.0,
            ("decode-0", "kernels"): 40.0,
            ("decode-0", "event loop"): 3.0,
            ("gateway", "event loop"): 7.0,
        }
    )
    figures = split(threads, beside=2.0)
    assert figures == {FORWARD: 88.0, BESIDE: 2.0, "decode-0, event loop": 3.0, "gateway, event loop": 7.0}
    assert overhead(figures | {CLIENT: 100.0}) == pytest.approx(0.12)


def test_figures_of_workers_are_added_up_by_role() -> None:
    lines = [
        f'paceline:worker_stat{{role="{role}",name="{name}",worker="{worker}"}} {value}'
        for role, worker, name, value in (
            ("decode", "a", "steps", 3),
            ("decode", "b", "steps", 4),
            ("prefill", "c", "steps", 5),
        )
    ]
    assert worker_stats("\n".join(lines) + "\n") == {("decode", "steps"): 7, ("prefill", "steps"): 5}
