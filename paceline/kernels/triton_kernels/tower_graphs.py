"""The layers of encoders as CUDA graphs: recorded for each number of rows that comes a second time, then replayed by
one call.

An image has thousands of rows, but a layer has dozens of operations, whose launches take longer than the computation of
a usual image. Positions are inputs, so images of other shapes with the same number of soft tokens share a recording.
Nothing is padded, so the results have the same bits as without a recording.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.kernels.encoding import Between, Tower
from paceline.kernels.triton_kernels.graphs import Record, Recording

MAX_ROWS = 16_384
"""Largest number of rows of a recorded tower. With more rows, launches take a small part of the time."""
MAX_GRAPHS = 32
"""Largest number of shapes of inputs that a tower remembers, whether they were recorded or came only once."""
MAX_KEPT_ROWS = 81_920
"""Largest number of rows of all recordings of a tower. Each recording keeps its inputs and results: about 20 MB for
2,520 patches.
"""


class TowerGraphs:
    """A tower with a recording for each number of rows that has occurred twice. Many numbers of rows occur only once.

    Args:
        recorder: makes a recorder. All recordings of one recorder share a memory pool and are dropped together.
    """

    def __init__(self, tower: Tower, recorder: Callable[[], Record]) -> None:
        self._tower = tower
        self._recorder = recorder
        self._record = recorder()
        self._graphs: dict[tuple[object, ...], _Graph | None] = {}
        """Recordings by the shapes and dtypes of inputs; None if these came once."""
        self._kept_rows = 0
        """Rows of all recordings."""

    def __call__(self, *inputs: Tensor, between: Between) -> tuple[Tensor, ...]:
        if (rows := len(inputs[0])) > MAX_ROWS:
            return self._tower(*inputs, between=between)
        key = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        if key not in self._graphs:
            if len(self._graphs) == MAX_GRAPHS:
                self._drop_all()
            self._graphs[key] = None
            return self._tower(*inputs, between=between)
        between()
        if (graph := self._graphs[key]) is None:
            if self._kept_rows + rows > MAX_KEPT_ROWS:
                self._drop_all()
            graph = self._graphs[key] = _Graph(self._tower, inputs, self._record)
            self._kept_rows += rows
        return graph.run(inputs)

    def _drop_all(self) -> None:
        self._graphs.clear()
        self._kept_rows = 0
        self._record = self._recorder()


class _Graph:
    def __init__(self, tower: Tower, inputs: tuple[Tensor, ...], record: Record) -> None:
        self._inputs = kept = [each.clone() for each in inputs]
        self._recording: Recording = record(lambda: list(tower(*kept, between=_go_on)))

    def run(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for kept, given in zip(self._inputs, inputs):
            kept.copy_(given)
        self._recording.replay()
        # Clones, because the next replay writes to the same place.
        return tuple(result.clone() for result in self._recording.results)


def _go_on() -> None:
    """Do nothing between pieces: a recording is one piece."""
