"""Runs the inputs of one request on workers that pool, and returns their vectors or labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import Request
from numpy.typing import NDArray

from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.pooling import PoolOptions, TextInput


@dataclass(frozen=True, slots=True)
class Pooled:
    """The results of one request, in the order of its inputs."""

    rows: list[NDArray[np.float32]]
    """Of each input, the values [dim]; [rows, dim] if the task has a row for each token."""
    token_ids: list[list[int]]
    """The tokens of each input that were computed, special tokens included."""
    cut_tokens: list[int]
    """Number of tokens that each input has lost, because it was too long."""

    @property
    def prompt_tokens(self) -> list[int]:
        """Number of tokens of each input that were computed."""
        return [len(ids) for ids in self.token_ids]

    def usage(self) -> dict[str, Any]:
        """Return the `usage` object of a response. It says how many tokens were cut, if some were."""
        tokens = sum(self.prompt_tokens)
        cut = {"prompt_tokens_details": {"truncated_tokens": sum(self.cut_tokens)}} if any(self.cut_tokens) else {}
        return {"prompt_tokens": tokens, "total_tokens": tokens, **cut}


async def pool(model: ModelFleet, request: Request, inputs: Sequence[TextInput], options: PoolOptions) -> Pooled:
    """Compute the inputs of a request on the model's workers, and wait for all results.

    Raises:
        ApiError: the model does not have the task, an input is empty or too long, or a result is not finite.
        BusyError, UnavailableError: no worker had room or was ready in time, or the request failed too often.
    """
    raise NotImplementedError
