"""The execution of single operations by the library, with checks of their operands."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.core.turns import Turns
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.native.fusing import Operands
from paceline.kernels.native.library import (
    ERRORS,
    POINTERS,
    TYPES,
    KernelKind,
    KernelStep,
    Op,
    instruction_sets,
    load_library,
    make_step,
)
from paceline.kernels.native.replay import StepRecorder
from paceline.kernels.packed_weight import PackedWeight


class Operations:
    """A team of threads that computes operations one by one, or records them.

    Args:
        threads, instruction_set: the arguments of `NativeKernels`.
    """

    def __init__(self, threads: int, instruction_set: str) -> None:
        known = instruction_sets()
        self.instruction_set = known[0] if instruction_set == "auto" else instruction_set
        if self.instruction_set not in known:
            choices = ", ".join(["auto", *known])
            raise ConfigError(f"the instruction set {instruction_set!r} does not run here; choose one of: {choices}")
        self._library = load_library()
        self._team = self._library.paceline_team_start(threads, self.instruction_set.encode())
        if self._team is None:
            raise MemoryError("there is no memory for a team of threads")
        self.recorder: StepRecorder | None = None
        self.one_at_a_time = threading.Lock()
        # It must not run when the interpreter exits, because a thread of the engine may still be computing then.
        weakref.finalize(self, _stop_team, self._library, self._team, os.getpid()).atexit = False

    def take_turns(self, turns: Turns) -> None:
        self._turns = turns  # keeps the page alive
        page = ctypes.addressof(ctypes.c_char.from_buffer(turns.page))
        self._library.paceline_team_take_turns(self._team, page, turns.slot)

    def multiply(
        self,
        kind: KernelKind,
        x: Tensor,
        weight: PackedWeight,
        other: Tensor | None,
        dtype: torch.dtype,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """Compute an operation of `kind` whose main part is x @ weight.T. Return the product [tokens, out] in `dtype`.

        Args:
            other: the bias; for LOGITS, the tensor to which the best tokens are written.
            bounds: fp32 [4]: the bounds of `EncoderKernels.clipped_linear`; None for no bounds.
        """
        if x.dtype != weight.dtype or x.shape[1:] != (weight.size_in,):
            raise ValueError(
                f"x is {list(x.shape)} {x.dtype}; the weight takes [tokens, {weight.size_in}] {weight.dtype}"
            )
        x = with_dense_rows(x)
        out = x.new_empty(len(x), weight.size_out, dtype=dtype)
        op = Op(kind, rows=len(x), n0=weight.size_in, n1=weight.size_out, n2=x.stride(0))
        op.format = weight.format or 0
        self.run(op, out, (x, weight.data, other, bounds), dtype=x.dtype)
        return out

    def elementwise(self, kind: KernelKind, a: Tensor, b: Tensor) -> Tensor:
        need("the second operand", b, a.dtype, *a.shape)
        a, size = a.contiguous(), a.shape[1:].numel()
        b = with_dense_rows(b) if b.dim() == 2 else b.contiguous()
        out = a.new_empty(a.shape)
        self.run(Op(kind, rows=a.shape[0], n0=size, n1=b.stride(0)), out, (a, b))
        return out

    def run(
        self,
        op: Op,
        out: Tensor,
        inputs: Sequence[Tensor | None],
        batch: AttentionBatch | None = None,
        group: GroupTables | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Compute an operation now, or record it. Operands are checked on recording, not on replay.

        Args:
            dtype: the dtype in which the operation computes; by default the result's.
        """
        check(out)
        operands = (out, *inputs, *(None,) * (len(POINTERS) - 1 - len(inputs)))
        op.type = TYPES[dtype or out.dtype]
        if self.recorder is not None and out.is_meta:
            self.recorder.add(op, operands, group)
        else:
            self._run_now(op, operands, batch, group)

    def _run_now(self, op: Op, operands: Operands, batch: AttentionBatch | None, group: GroupTables | None) -> None:
        for name, tensor in zip(POINTERS, operands):
            setattr(op, name, None if tensor is None else tensor.data_ptr())
        step = KernelStep(tokens=1)
        if batch is not None and group is not None:
            step = make_step(op.rows, batch, (group,))
            op.rows = 1
        self.execute(op, 1, step)

    def execute(self, ops: ctypes.Array[Op] | Op, count: int, step: KernelStep) -> None:
        """Run operations in order. Raises IndexError if a token id or slot does not exist, and MemoryError."""
        error = self._library.paceline_run(self._team, ctypes.byref(ops), count, ctypes.byref(step))
        if error:
            kind, message = ERRORS[error]
            raise kind(message)


def _stop_team(library: ctypes.CDLL, team: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked process does not have the threads for which this call would wait
        library.paceline_team_stop(team)


def check(tensor: Tensor) -> None:
    if tensor.dtype not in TYPES or not (tensor.is_cpu or tensor.is_meta):
        raise ConfigError(
            f"the native kernels compute bfloat16 and float32 on cpu, not {tensor.dtype} on {tensor.device}; "
            "choose --kernels reference"
        )


def with_dense_rows(x: Tensor) -> Tensor:
    """Return x [rows, size], copied if the elements of a row are not dense. Rows may be apart from each other."""
    return x if x.stride(1) == 1 else x.contiguous()


def need(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)} {dtype}, not {list(tensor.shape)} {tensor.dtype}")


def ints(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor int64 [tokens], copied if it is not contiguous. `name` is its name in errors."""
    need(name, tensor, torch.int64, len(tensor))
    return tensor.contiguous()
