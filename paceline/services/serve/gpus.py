"""The GPUs of this machine. `paceline serve --device cuda` gives one of them to each worker."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from paceline.core import env
from paceline.core.config import ServeConfig

_FOLDER = Path("/proc/driver/nvidia/gpus")
"""A folder of NVIDIA's driver with an entry for each GPU."""


def visible_gpus(folder: Path = _FOLDER) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; [] if they are unknown."""
    if (named := env.visible_gpus()) is not None:
        return [name for each in named.split(",") if (name := each.strip())]
    try:
        return [str(number) for number in range(len(os.listdir(folder)))]
    except OSError:
        return []


def default_budget(config: ServeConfig, gpus: int, roles: Sequence[str] = ("prefill", "decode", "encode")) -> int:
    """Return the planner's budget for a user who has set none: the number of GPUs, or the number of workers that the
    user wants if it is larger.

    Several workers on one GPU are no faster than one, so the planner adds no worker that would have to share.

    Args:
        roles: the roles of workers that the model may have.
    """
    values: dict[str, int] = config.model_dump()
    return max(gpus, sum(values[f"{role}_devices"] * max(values[role], values[f"least_{role}"]) for role in roles))


class GpuPlaces:
    """Gives each worker the GPU that the fewest workers have.

    Args:
        gpus: the GPUs, as CUDA_VISIBLE_DEVICES names them; may be empty.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._workers = Counter(dict.fromkeys(gpus, 0))

    @property
    def count(self) -> int:
        """Number of known GPUs."""
        return len(self._workers)

    def take(self) -> str | None:
        """Return the GPU for one more worker, and note that the worker has it; None if no GPU is known."""
        if not self._workers:
            return None
        gpu = min(self._workers, key=self._workers.__getitem__)
        self._workers[gpu] += 1
        return gpu

    def is_shared(self, gpu: str) -> bool:
        """Return whether a GPU has more than one worker."""
        return self._workers[gpu] > 1

    def give_back(self, gpu: str) -> None:
        """Note that a worker on this GPU has ended."""
        self._workers[gpu] -= 1
