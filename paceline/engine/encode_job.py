"""One run of an encoder on the engine's compute thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.kernels.encoding import Between


class EncodingStoppedError(Exception):
    """The engine stops, so the encoder must not go on. Raised by `Between`."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodeJob:
    """The work of an encoder for one input.

    Args:
        run: encodes the input and stores the result. It is called on the compute thread, with a function to call
            between pieces of some milliseconds.
        on_end: called on the compute thread when `run` has returned, or with the error that it has raised.
    """

    run: Callable[[Between], None]
    on_end: Callable[[Exception | None], None]
