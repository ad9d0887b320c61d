"""The choice of tokens on the GPU that holds the logits. The host waits for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import triton
from torch import Tensor

from paceline.kernels.choosing import Draw
from paceline.kernels.transfer import to_device
from paceline.kernels.triton_kernels.device import sampling as device

_BEST = {"BLOCK": 4096, "num_warps": 8}
_DRAW = {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": False}
"""Launch options of the drawing kernel. They are not tuned, because another block size or number of warps would add in
another order.
"""
_TOKEN = 0
"""The purpose of the random number: `paceline.engine.sampler.Purpose.TOKEN`."""


class TritonChooser:
    """The `TokenChooser` of `TritonKernels`."""

    def choose(self, logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> Tensor:
        ways: dict[Callable[[Tensor, Sequence[Draw]], Tensor], list[int]] = {}
        for index, draw in enumerate(draws):
            ways.setdefault(_way(draw, logits.shape[1]), []).append(index)
        if len(ways) == 1:
            return next(iter(ways))(_take(logits, rows), draws)
        out = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        for choose, own_places in ways.items():
            own_logits = _take(logits, [rows[place] for place in own_places])
            out[_on(logits.device, own_places)] = choose(own_logits, [draws[place] for place in own_places])
        return out

    def accept(self, tokens: Tensor, drafts: Tensor, first_rows: Sequence[int]) -> Tensor:
        requests = len(first_rows) - 1
        width = max((end - begin for begin, end in pairwise(first_rows)), default=0) or 1
        out = torch.empty(requests, width, dtype=torch.int64, device=tokens.device)
        starts = to_device(torch.tensor(first_rows, dtype=torch.int32, device="cpu"), tokens.device)
        padded = triton.next_power_of_2(width)
        device.accept[requests,](out, tokens, drafts, starts, WIDTH=width, PADDED=padded, num_warps=1)
        return out


def _take(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Return these rows of logits. If they are all rows in order, nothing is copied."""
    return logits if list(rows) == list(range(len(logits))) else logits[_on(logits.device, rows)]


def _on(device: torch.device, places: Sequence[int]) -> Tensor:
    return to_device(torch.tensor(places, device="cpu"), device)


def _way(draw: Draw, vocab_size: int) -> Callable[[Tensor, Sequence[Draw]], Tensor]:
    if draw.temperature == 0:
        return _best
    return _draw_ranked if 0 < draw.top_k < vocab_size or draw.top_p < 1 else _draw_in_order


def _best(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    device.best[len(draws),](out, logits, logits.stride(0), SIZE=logits.shape[1], **_BEST)
    return out


def _draw_in_order(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw a token of each row. The cumulative sum goes in the order of token ids."""
    floats, ints = _parameters(draws, logits)
    return _draw(logits.double() / floats[0].unsqueeze(1), floats, ints)


def _draw_ranked(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw a token of each row. The cumulative sum goes from the most likely token on, with ties in order of ids."""
    floats, ints = _parameters(draws, logits)
    values, order = logits.sort(dim=1, descending=True, stable=True)
    places = _draw(values.double() / floats[0].unsqueeze(1), floats, ints)
    return order.gather(1, places.unsqueeze(1)).squeeze(1)


def _parameters(draws: Sequence[Draw], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp64 [3, rows] (temperature, min_p, top_p) and int64 [3, rows] (seed, position, top_k) for `draw`."""
    floats = [[d.temperature, d.min_p, d.top_p if d.top_p < 1 else math.inf] for d in draws]
    ints = [[d.seed - (d.seed >> 63 << 64), d.position, d.top_k or logits.shape[1]] for d in draws]
    both = (torch.tensor(floats, dtype=torch.float64, device="cpu"), torch.tensor(ints, device="cpu"))
    first, second = (to_device(part.t().contiguous(), logits.device) for part in both)
    return first, second


def _draw(values: Tensor, floats: Tensor, ints: Tensor) -> Tensor:
    """Draw an index into each row of `values`, which are logits over temperature, fp64 [rows, vocab]."""
    rows, size = values.shape
    weights = torch.exp(values - values.amax(1, keepdim=True))
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    seeds, positions, top_k = ints
    _, min_p, top_p = floats
    device.draw[rows,](
        out, weights, seeds, positions, top_k, min_p, top_p, weights.stride(0), PURPOSE=_TOKEN, SIZE=size, **_DRAW
    )
    return out
