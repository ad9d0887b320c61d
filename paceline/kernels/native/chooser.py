"""The choice of tokens by the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from paceline.kernels.choosing import Draw
from paceline.kernels.native.library import TYPES, KernelChoice, KernelKind, KernelStep, Op
from paceline.kernels.native.operations import Operations, need, with_dense_rows


class NativeChooser:
    """The `TokenChooser` of `NativeKernels`."""

    def __init__(self, kernels: Operations) -> None:
        self._kernels = kernels

    def choose(self, logits: Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> Tensor:
        need("the logits", logits, torch.float32, len(logits), logits.shape[1])
        if not all(0 <= row < len(logits) for row in rows):
            raise IndexError(f"rows {list(rows)} were asked for; there are {len(logits)} rows of logits")
        logits = with_dense_rows(logits)
        choices = (KernelChoice * len(rows))(
            *(
                KernelChoice(row, draw.temperature, draw.top_k, draw.min_p, draw.top_p, draw.seed, draw.position)
                for row, draw in zip(rows, draws, strict=True)
            )
        )
        tokens = logits.new_empty(len(rows), dtype=torch.int64)
        op = Op(KernelKind.CHOOSE, TYPES[logits.dtype], len(rows), n0=logits.shape[1], n1=logits.stride(0))
        op.out, op.a, op.b = tokens.data_ptr(), logits.data_ptr(), ctypes.addressof(choices)
        self._kernels.execute(op, 1, KernelStep(tokens=1))
        return tokens

    def accept(self, tokens: Tensor, drafts: Tensor, first_rows: Sequence[int]) -> Tensor:
        chosen, proposed = tokens.tolist(), drafts.tolist()
        accepted = []
        for first, end in pairwise(first_rows):
            last = first
            while last + 1 < end and chosen[last] == proposed[last + 1]:
                last += 1
            accepted.append(chosen[first : min(last + 1, end)])
        width = max((len(drafts) for drafts in accepted), default=0) or 1
        return torch.tensor([drafts + [-1] * (width - len(drafts)) for drafts in accepted]).view(len(accepted), width)
