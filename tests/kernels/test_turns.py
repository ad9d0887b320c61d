"""Turns of the native kernels, which they take between operations."""

from __future__ import annotations

import mmap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from paceline.core.turns import PAGE_BYTES, DecodeTurns, PrefillTurns
from paceline.kernels.native import NativeKernels

WANTED, FIRST_SLOT = 1, 2


@pytest.fixture
def page() -> memoryview:
    return memoryview(mmap.mmap(-1, PAGE_BYTES))


def test_prefill_waits_before_an_operation(page: memoryview) -> None:
    kernels, words = NativeKernels(2), page.cast("q")
    kernels.take_turns(PrefillTurns(page))
    words[FIRST_SLOT + 61] = time.monotonic_ns() + 60 * 10**9
    x = torch.ones(3, 8)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(kernels.add, x, x)
        for _ in range(3):
            words[WANTED] = 0
            while words[WANTED] < time.monotonic_ns():
                time.sleep(0.001)
        assert not result.done()
        words[FIRST_SLOT + 61] = 0
        assert torch.equal(result.result(10), x + x)


def test_decode_says_so_while_it_computes(page: memoryview) -> None:
    kernels, words = NativeKernels(2), page.cast("q")
    kernels.take_turns(DecodeTurns(page, 3, 0.05))
    words[FIRST_SLOT + 3] = began = time.monotonic_ns()
    weight, x = kernels.pack(torch.zeros(4096, 4096)), torch.zeros(512, 4096)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(kernels.linear, x, weight)
        seen = set()
        while not result.done():
            seen.add(words[FIRST_SLOT + 3])
    assert max(seen) > began
    assert words[FIRST_SLOT + 3] == 0
