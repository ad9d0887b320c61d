"""Plain loops of one instruction set, as upper bounds for the rates of reading and computing.

The loops are in floors.cpp. g++ compiles them for the instruction set when they are needed.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from paceline.kernels.native.library import load_library
from paceline.kernels.native.memory import WeightMemory

SOURCE = Path(__file__).with_name("floors.cpp")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
FLAGS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512-bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma"),
    "neon-bf16": ("-march=armv8.2-a+bf16+dotprod",),
    "neon": (),
    "portable": (),
}
"""Flags of g++, by instruction set."""
FUSED = {"avx512_vnni": ("avx512", "-mavx512vnni"), "avx_vnni": ("avx2", "-mavxvnni")}
"""Flags of g++ for processors that multiply and add 16-bit integers in one instruction: by the name in /proc/cpuinfo,
with the first letters of the instruction sets that use it.
"""
READ_BYTES = 200 << 20
_COMPUTED = ("compute_fp32", "compute_bf16", "compute_pairs", "compute_bytes")
"""Functions of floors.cpp for the rates of computing, in the order of `Rates`."""
COMPUTE_SECONDS = 0.03
"""Approximate time of one measurement of a rate of computing, in seconds."""


@dataclass(frozen=True)
class Rates:
    """Rates of all threads together: bytes per second, and operations per second (0: there are no such instructions).

    An operation is a multiplication or an addition.
    """

    read: float
    fp32: float
    bf16: float
    pairs: float
    """Rate with pairs of 16-bit integers."""
    bytes: float
    """Rate with signed bytes."""


class Floors:
    """The plain loops of an instruction set, run by `threads` threads at the same time."""

    def __init__(self, instruction_set: str, threads: int) -> None:
        self._library = _compile(instruction_set)
        self._pool = ThreadPoolExecutor(threads)
        self._threads = threads

    def rates(self, rounds: int) -> Rates:
        """Measure all rates: medians of `rounds`."""
        # The same kind of memory as that of packed weights, because the size of pages matters.
        data = WeightMemory(load_library()).take(READ_BYTES).fill_(1)
        part = data.nbytes // self._threads // 1024 * 1024
        read = self._seconds(
            rounds, lambda thread: self._library.read_all(data.data_ptr() + thread * part, ctypes.c_int64(part))
        )
        computed = (self._compute(name, rounds) for name in _COMPUTED)
        return Rates(self._threads * part / read, *computed)

    def read_blocks(self, blocks: Tensor, block_bytes: int, rounds: int) -> float:
        """Return the seconds that reading blocks in their order takes.

        Args:
            blocks: addresses, int64 [count]; they are divided among the threads.
        """
        shares = [share.contiguous() for share in blocks.tensor_split(self._threads)]

        def read(thread: int) -> None:
            own = shares[thread]
            self._library.read_blocks(ctypes.c_void_p(own.data_ptr()), ctypes.c_int64(len(own)), block_bytes)

        return self._seconds(rounds, read)

    def _compute(self, name: str, rounds: int) -> float:
        function, loops = getattr(self._library, name), 1000
        if not function(1):
            return 0.0

        def seconds(rounds: int) -> float:
            return self._seconds(rounds, lambda thread: function(loops))

        while seconds(1) < COMPUTE_SECONDS:
            loops *= 2
        return float(self._threads * function(1) * loops / seconds(rounds))

    def _seconds(self, rounds: int, run: Callable[[int], object]) -> float:
        """Return the median seconds of a run of all threads, each with its number. One more run comes before."""
        return statistics.median([self._once(run) for _ in range(rounds + 1)][1:])

    def _once(self, run: Callable[[int], object]) -> float:
        # With one thread, CPU time, which other work on the machine hardly changes.
        clock = time.thread_time if self._threads == 1 else time.perf_counter
        began = clock()
        if self._threads == 1:
            run(0)
        else:
            list(self._pool.map(run, range(self._threads)))
        return clock() - began


def _compile(instruction_set: str) -> ctypes.CDLL:
    flags = list(FLAGS[instruction_set])
    known = Path("/proc/cpuinfo").read_text().split()
    flags += [flag for name, (sets, flag) in FUSED.items() if name in known and instruction_set.startswith(sets)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "floors.so"
        command = ["g++", "-std=c++17", "-O3", "-fPIC", "-shared", "-Wno-psabi", *flags, str(SOURCE), "-o", str(file)]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(file))
    for name in _COMPUTED:
        function = getattr(library, name)
        function.argtypes, function.restype = (ctypes.c_int64,), ctypes.c_double
    library.read_all.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.read_blocks.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    return library
