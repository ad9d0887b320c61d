"""Cores and priorities of workers under bench.serving.placed."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from bench.serving.placed import cores, niceness, place_threads

TWO_THREADS = (
    "import threading, sys; threading.Thread(target=sys.stdin.read).start(); print(flush=True); sys.stdin.read()"
)


def test_what_is_written_is_a_role_and_its_value() -> None:
    assert cores("decode=0,1") == ("decode", [0, 1])
    assert niceness("prefill=-3") == ("prefill", -3)
    for text in ("gateway=0", "decode", "decode=", "decode=all"):
        with pytest.raises(ValueError, match=r"no such role|invalid literal"):
            cores(text)


def test_all_threads_of_a_process_are_placed() -> None:
    core, before = min(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)
    with subprocess.Popen([sys.executable, "-c", TWO_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        place_threads(psutil.Process(child.pid), [core], 1)
        threads = [thread.id for thread in psutil.Process(child.pid).threads()]
        assert len(threads) == 2
        for thread in threads:
            assert os.sched_getaffinity(thread) == {core}
            assert os.getpriority(os.PRIO_PROCESS, thread) == min(before + 1, 19)
