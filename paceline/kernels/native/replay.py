"""A model's forward pass as one call: recorded once, then replayed without Python's cost per operation.

A replay on a CPU corresponds to a CUDA graph on a GPU. For the recording, the model runs once on the meta device: its
kernels record operations instead of computing, and its tensors stand for buffers. The recorded program works for any
number of tokens.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.core.errors import ConfigError
from paceline.kernels.batch import GroupTables
from paceline.kernels.interface import Forward, ForwardInputs, run_with_states
from paceline.kernels.native.fusing import Operands, buffer_of, fuse
from paceline.kernels.native.library import POINTERS, KernelStep, Op, make_step

RECORDED_TOKENS = 2
"""Number of tokens in the pass that is recorded. A pass of one token would not show the stride of rows."""
_TOKENS_STEP = 64
_CACHE_LINE = 64
_MAX_PROGRAMS = 8


class StepRecorder:
    """Records the operations of one forward pass."""

    def __init__(self, groups: Sequence[GroupTables]) -> None:
        self.operations: list[tuple[Op, Operands]] = []
        self._groups = groups

    def add(self, op: Op, operands: Operands, group: GroupTables | None) -> None:
        if group is not None:
            op.group = next(index for index, known_group in enumerate(self._groups) if known_group is group)
        op.rows //= RECORDED_TOKENS
        self.operations.append((op, operands))


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to compute with tensors that stand for buffers, because a replay would not do it again."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # With True, torch would import torch.compile, triton and sympy, which take over a second and 100 MiB.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_view = all(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and "empty" not in func.__name__:
            leaves = tree_leaves((args, kwargs))
            if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
                raise ConfigError(f"the model calls {func} outside of its kernels; choose --kernels reference")
        return func(*args, **kwargs)


class Executor(Protocol):
    """The kernels that record and compute a program: `NativeKernels`."""

    recorder: StepRecorder | None
    one_at_a_time: threading.Lock
    """Lock that is held while a pass is recorded or replayed."""

    def execute(self, ops: ctypes.Array[Op] | Op, count: int, step: KernelStep) -> None: ...


class Program:
    """The operations of a pass in order, and the places of their results.

    A buffer has a fixed number of bytes per token. Buffers lie one after another; two that are never needed at the same
    time may share a place. A buffer's place is its offset per token, times the tokens for which there is room.
    """

    def __init__(self, recorder: StepRecorder, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        operations = fuse(recorder.operations, results)
        self._operands = [operands for _, operands in operations]
        self._ops = (Op * len(operations))(*(op for op, _ in operations))
        self._rows = [((*result.shape[1:],), result.dtype) for result in results]
        self._inputs = {buffer_of(tensor) for tensor in inputs}
        # Each step has other memory for the results, and for all inputs but token ids and positions.
        self._outside = {buffer_of(tensor): index for index, tensor in enumerate((*inputs[2:], *results))}
        self._offsets, self._bytes_per_token = self._plan()
        self._capacity = 0
        self._places: list[tuple[Op, str, int, int]] = []
        """Operation, operand, index of a tensor in `_outside`, and offset in this tensor in bytes."""

    def run(self, executor: Executor, inputs: ForwardInputs) -> list[Tensor]:
        """Compute a step and return the results, each in new memory."""
        token_ids, positions, batch = inputs.token_ids, inputs.positions, inputs.batch
        tokens = len(token_ids)
        if tokens > self._capacity:
            self._make_room(-(-tokens // _TOKENS_STEP) * _TOKENS_STEP)
        results = [torch.empty(tokens, *row, dtype=dtype) for row, dtype in self._rows]
        outside = [*(tensor.contiguous() for tensor in inputs.further), *results]
        for op, name, index, offset in self._places:
            setattr(op, name, outside[index].data_ptr() + offset)
        if token_ids.dtype != torch.int64 or positions.dtype != torch.int64:
            raise ValueError(f"token ids and positions must be int64, not {token_ids.dtype} and {positions.dtype}")
        step = make_step(tokens, batch, batch.groups)
        token_ids, positions = token_ids.contiguous(), positions.contiguous()
        step.token_ids, step.positions = token_ids.data_ptr(), positions.data_ptr()
        executor.execute(self._ops, len(self._ops), step)
        return results

    def _plan(self) -> tuple[dict[int, int], int]:
        """Return the offset of every buffer and the size of all, both in bytes per token."""
        last_use = {
            buffer_of(tensor): index for index, operands in enumerate(self._operands) for tensor in _buffers(operands)
        }
        offsets: dict[int, int] = {}
        free: dict[int, list[int]] = {}
        end = 0
        for index, operands in enumerate(self._operands):
            sizes = {buffer_of(tensor): _bytes_per_token(tensor) for tensor in _buffers(operands)}
            sizes = {buffer: size for buffer, size in sizes.items() if buffer not in self._inputs}
            for buffer, size in sizes.items():
                if buffer not in offsets:
                    if not free.setdefault(size, []):
                        free[size].append(end)
                        end += size
                    offsets[buffer] = free[size].pop()
            for buffer, size in sizes.items():
                if last_use[buffer] == index:
                    free[size].append(offsets[buffer])
        return offsets, end

    def _make_room(self, capacity: int) -> None:
        self._memory = torch.empty(self._bytes_per_token * capacity + _CACHE_LINE, dtype=torch.uint8)
        base = -(-self._memory.data_ptr() // _CACHE_LINE) * _CACHE_LINE
        self._places = []
        for op, operands in zip(self._ops, self._operands):
            for name, tensor in zip(POINTERS, operands):
                if tensor is None:
                    continue
                if not tensor.is_meta:
                    setattr(op, name, tensor.data_ptr())
                    continue
                buffer, offset = buffer_of(tensor), int(tensor.storage_offset()) * tensor.itemsize
                if buffer in self._outside:
                    self._places.append((op, name, self._outside[buffer], offset))
                elif buffer not in self._inputs:
                    setattr(op, name, base + self._offsets[buffer] * capacity + offset)
        self._capacity = capacity


class Replay:
    """A forward pass that is recorded when it is first called with some caches, and replayed from then on."""

    def __init__(self, forward: Forward, executor: Executor) -> None:
        self._forward = forward
        self._executor = executor
        self._programs: dict[tuple[object, ...], Program] = {}

    def __call__(self, inputs: ForwardInputs) -> Tensor:
        key = inputs.recording_key
        with self._executor.one_at_a_time:
            program = self._programs.get(key)
            if program is None:
                if len(self._programs) == _MAX_PROGRAMS:
                    self._programs.clear()
                program = self._programs[key] = self._record(inputs)
            result, *states = program.run(self._executor, inputs)
        inputs.keep_states(states)
        return result

    def _record(self, inputs: ForwardInputs) -> Program:
        token_ids, positions = (torch.empty(RECORDED_TOKENS, dtype=torch.int64, device="meta") for _ in range(2))
        further = [
            torch.empty(RECORDED_TOKENS, *tensor.shape[1:], dtype=tensor.dtype, device="meta")
            for tensor in inputs.further
        ]
        recorded = replace(inputs, token_ids=token_ids, positions=positions, further=further)
        self._executor.recorder = recorder = StepRecorder(inputs.batch.groups)
        try:
            with _OnlyViews():  # type: ignore[no-untyped-call]
                results = run_with_states(self._forward, recorded)
        finally:
            self._executor.recorder = None
        return Program(recorder, (token_ids, positions, *further), results)


def _buffers(operands: Operands) -> list[Tensor]:
    """Return the operands that are inputs or results of the pass, not weights."""
    return [tensor for tensor in operands if tensor is not None and tensor.is_meta]


def _bytes_per_token(tensor: Tensor) -> int:
    """Return the bytes per token of a tensor's buffer, rounded up to whole cache lines."""
    return -(-tensor.untyped_storage().nbytes() // RECORDED_TOKENS // _CACHE_LINE) * _CACHE_LINE
