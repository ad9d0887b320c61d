"""Tuning of kernels: launch options of a kernel are measured once, and the fastest options are kept on the disk."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton

from paceline.core import env

log = logging.getLogger(__name__)

Options = dict[str, int]


class Tuner:
    """Finds the fastest of several ways to launch a kernel, all of which must give the same bits.

    Args:
        file: file of the results for one GPU and version of Triton; None keeps the results in this process only.
        measure: returns the seconds that a launch takes.
    """

    def __init__(self, file: Path | None, measure: Callable[[Callable[[], None]], float]) -> None:
        self._file = file
        self._measure = measure
        self._found = self._read()

    def best(self, kernel: str, shape: str, choices: Sequence[Options], launch: Callable[[Options], None]) -> Options:
        """Return the fastest of `choices`. If it is not known yet, launch each choice many times, and skip choices that
        fail.
        """
        name = f"{kernel} {shape}"
        if self._found.get(name) not in choices:
            seconds = [self._time(launch, options) for options in choices]
            self._found[name] = choices[seconds.index(min(seconds))]
            self._write()
        return self._found[name]

    def _time(self, launch: Callable[[Options], None], options: Options) -> float:
        try:
            return self._measure(lambda: launch(options))
        except triton.runtime.errors.OutOfResources:
            return float("inf")

    def _read(self) -> dict[str, Options]:
        """Return the known results. A missing or damaged file counts as empty."""
        try:
            content = json.loads(self._file.read_text()) if self._file is not None else {}
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _write(self) -> None:
        """Write the results, and keep results that other processes have written since. Only speed depends on them."""
        if self._file is None:
            return
        self._found = self._read() | self._found
        new_file = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new_file.write_text(json.dumps(self._found, indent=1, sort_keys=True) + "\n")
            new_file.replace(self._file)
        except OSError as error:
            log.warning("the results of kernel tuning cannot be kept in %s: %s", self._file, error)


class Untuned:
    """A tuner that returns the first choice, because times in Triton's interpreter mean nothing."""

    def best(self, kernel: str, shape: str, choices: Sequence[Options], launch: Callable[[Options], None]) -> Options:
        return choices[0]


def gpu_tuner(device: torch.device) -> Tuner:
    """Return a tuner for this GPU. Its file is in the cache folder and has the GPU's name."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device))
    file = env.default_cache_dir() / "tuning" / f"{name}-triton-{triton.__version__}.json"
    return Tuner(file, lambda run: float(triton.testing.do_bench(run)) / 1e3)
