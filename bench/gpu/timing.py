"""Times on the device's own timeline, and the best rates that the machine reaches."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.step_clock import Event, HostEvent

NO_GPU = "there is no CUDA device here; --small runs tiny shapes on the CPU"


def options_of(description: str, small: str, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks of kernels have in common.

    Args:
        small: description of the runs with --small.
        rounds: default of --rounds.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for all figures")
    parser.add_argument("--small", action="store_true", help=f"{small}, on whatever device there is")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--kernels", default="auto")
    return parser


def pick_device(small: bool) -> torch.device:
    """Return the GPU. Without a GPU return the CPU if `small`, else end the process with an error message."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not small:
        sys.exit(NO_GPU)
    return torch.device("cpu")


def median_seconds(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median seconds of one run.

    Up to three runs before do not count, because kernels are compiled and tuned in them.
    """
    for _ in range(min(rounds, 3)):
        run()
    times = []
    for _ in range(rounds):
        begin, end = _event(device), _event(device)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def recorded(run: Callable[[], list[Tensor]], device: torch.device) -> Callable[[], object]:
    """Return a function that replays `run` as a CUDA graph. On a CPU, return `run` itself."""
    if device.type != "cuda":
        return run
    from paceline.kernels.triton_kernels.graphs import CudaRecorder

    return CudaRecorder()(run).replay


def _event(device: torch.device) -> Event:
    event: Event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else HostEvent()
    return event


def read_bandwidth(device: torch.device, small: bool) -> float:
    """Return the memory read bandwidth in bytes per second, the limit of decoding."""
    data = torch.ones((1 << 22) if small else (1 << 30), dtype=torch.float32, device=device)
    return data.nbytes / median_seconds(data.sum, device, 10)


def matrix_peak(device: torch.device, dtype: torch.dtype, small: bool) -> float:
    """Return the operations per second of the vendor's product of large matrices, the limit of prefill."""
    size = 256 if small else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2.0 * size**3 / median_seconds(lambda: a @ b.t(), device, 10)
