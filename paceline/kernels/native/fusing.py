"""Changes of a recorded pass that let several operations be computed as one. The bits of results stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from paceline.kernels.native.library import COMPRESSED, MOST_JOINED, KernelKind, Op
from paceline.kernels.native.tiles import BYTE_INPUT, FIXED_SCALE, must_unpack

Operands = tuple[Tensor | None, ...]
"""The tensors to which the `POINTERS` of an operation point."""
Operation = tuple[Op, Operands]

_GATED = {
    KernelKind.SILU_AND_MUL: KernelKind.LINEAR_SILU_AND_MUL,
    KernelKind.GELU_TANH_AND_MUL: KernelKind.LINEAR_GELU_TANH_AND_MUL,
}
_JOINED = (KernelKind.LINEAR, KernelKind.ADAPT)


def fuse(operations: Sequence[Operation], results: Sequence[Tensor]) -> list[Operation]:
    """Return the operations of a pass in fewer jobs.

    Args:
        results: the results of the pass, which must be computed.
    """
    fused = fuse_gated_layers(gather_adapters(operations), results)
    join_layers(fused)
    return fused


def gather_adapters(operations: Sequence[Operation]) -> list[Operation]:
    """Put the adapters of consecutive linear layers with the same input after all of these layers, so that both the
    layers and the adapters are one job.
    """
    gathered: list[Operation] = []
    waiting: list[Operation] = []
    for op, operands in operations:
        if op.kind == KernelKind.ADAPT:
            waiting.append((op, operands))
            continue
        if not (waiting and op.kind == KernelKind.LINEAR and operands[1] is waiting[0][1][1]):
            gathered += waiting
            waiting = []
        gathered.append((op, operands))
    return gathered + waiting


def fuse_gated_layers(operations: Sequence[Operation], results: Sequence[Tensor]) -> list[Operation]:
    """Fuse two linear layers with the activation if no other operation reads their results.

    The intermediate results, which are the widest rows of a model, are then never written to memory.
    """
    uses = Counter(buffer_of(tensor) for _, operands in operations for tensor in operands if tensor is not None)
    uses.update(map(buffer_of, results))

    def is_between(tensor: Tensor | None) -> bool:
        return tensor is not None and uses[buffer_of(tensor)] == 2

    fused: list[Operation] = []
    for op, operands in operations:
        fused.append((op, operands))
        if op.kind in _GATED and len(fused) > 2:
            (gate, (gate_out, x, gate_weight, gate_bias, _)), (up, (up_out, up_x, up_weight, up_bias, _)) = fused[-3:-1]
            if (
                gate.kind == up.kind == KernelKind.LINEAR
                and gate.format == up.format
                and not gate.format & FIXED_SCALE
                and gate_bias is up_bias is None
                and (x is up_x and gate_out is operands[1] and up_out is operands[2])
                and (is_between(gate_out) and is_between(up_out))
            ):
                gate.kind = _GATED[KernelKind(op.kind)]
                fused[-3:] = [(gate, (operands[0], x, gate_weight, up_weight, None))]
    return fused


def join_layers(operations: Sequence[Operation]) -> None:
    """Mark consecutive linear layers, or adapters, that have the same input, so that all threads compute them together
    as one job.
    """
    first: Operation | None = None
    for op, operands in operations:
        if first is not None and _can_join(first, op, operands):
            first[0].joined += 1
        else:
            first = (op, operands) if op.kind in _JOINED else None


def _can_join(first: Operation, op: Op, operands: Operands) -> bool:
    kernel_op, (_, x, *_) = first
    return (
        op.kind == kernel_op.kind
        and operands[1] is x
        and kernel_op.joined + 1 < MOST_JOINED
        and (op.kind == KernelKind.ADAPT or (_form(op) == _form(kernel_op) and not kernel_op.format & FIXED_SCALE))
    )


def _form(op: Op) -> tuple[bool, bool, bool, int]:
    """Return whether the operation's weights have a special format, whether they are compressed, whether they are
    always unpacked, and how x is rounded. All operations of a job have the same form, and round x in the same way.
    """
    return op.format != 0, op.format == COMPRESSED, must_unpack(op.format), op.format & (BYTE_INPUT | FIXED_SCALE)


def buffer_of(tensor: Tensor) -> int:
    """Return an id of a tensor's buffer, which all views of it share."""
    return int(tensor.untyped_storage()._cdata)
