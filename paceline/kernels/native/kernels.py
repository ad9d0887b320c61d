"""`Kernels` in C++ for CPU: matrix products at memory speed, and rows that never depend on their batch."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.kernels.interface import AttentionBatch, Forward, GroupTables, LayerCache, PackedWeight
from paceline.kernels.native.library import (
    ERRORS,
    TYPES,
    Cache,
    Kind,
    Op,
    Step,
    instruction_sets,
    load_library,
    make_step,
)
from paceline.kernels.native.replay import Operands, Recorder, Replay
from paceline.kernels.native.tiles import pack_tiles, tile_format, tiles_bytes
from paceline.kernels.quantized import QuantizedMatrix


class NativeKernels:
    """bf16 and fp32 on CPU, by a team of threads of its own.

    Every row of a result is computed in an order that depends on the weights' shapes alone. So it is the same, bit for
    bit, in any batch, in any chunk of a prompt, and on any number of threads. Different instruction sets may differ.

    Args:
        threads: how many compute together, the calling one included.
        instruction_set: "auto" for the best that runs here, or its name.

    Raises:
        ConfigError: the library was not compiled, or the instruction set does not run here.
    """

    name = "native"

    def __init__(self, threads: int, instruction_set: str = "auto") -> None:
        known = instruction_sets()
        self.instruction_set = known[0] if instruction_set == "auto" else instruction_set
        if self.instruction_set not in known:
            raise ConfigError(f"{instruction_set!r} does not run here; choose one of: {', '.join(['auto', *known])}")
        self._library = load_library()
        self._team = self._library.paceline_team_start(threads, self.instruction_set.encode())
        self.recorder: Recorder | None = None
        self.one_at_a_time = threading.Lock()
        # Not when the interpreter ends: a thread of the engine may be computing then.
        weakref.finalize(self, self._library.paceline_team_stop, self._team).atexit = False

    def compile(self, forward: Forward) -> Forward:
        return Replay(forward, self)

    def pack(self, weight: Tensor | QuantizedMatrix) -> PackedWeight:
        out, size_in = weight.shape
        if isinstance(weight, QuantizedMatrix):
            tiles = torch.empty(tiles_bytes(weight), dtype=torch.uint8)
            self._library.paceline_use_large_pages(tiles.data_ptr(), tiles.nbytes)
            pack_tiles(weight, tiles)
            return PackedWeight(tiles, out, size_in, weight.dtype, tile_format(weight))
        if weight.is_meta:
            return PackedWeight(weight, out, size_in, weight.dtype)
        _check(weight)
        kind, weight = TYPES[weight.dtype], weight.contiguous()
        packed_bytes = self._library.paceline_packed_bytes(kind, out, size_in)
        data = torch.empty(packed_bytes // weight.itemsize, dtype=weight.dtype)
        self._library.paceline_pack(kind, weight.data_ptr(), out, size_in, data.data_ptr())
        return PackedWeight(data, out, size_in, weight.dtype)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        if x.dtype != weight.dtype or x.shape[1:] != (weight.size_in,):
            raise ValueError(
                f"x is {list(x.shape)} {x.dtype}; the weight takes [tokens, {weight.size_in}] {weight.dtype}"
            )
        x = _with_dense_rows(x)
        out = x.new_empty(x.shape[0], weight.size_out)
        numbers = (weight.size_in, weight.size_out, x.stride(0))
        kind = Kind.LINEAR if weight.format is None else Kind.QUANTIZED_LINEAR
        self._run(kind, x.shape[0], out, (x, weight.data, bias), numbers, format=weight.format)
        return out

    def embed(self, token_ids: Tensor, weight: PackedWeight, scale: float = 1.0) -> Tensor:
        out = token_ids.new_empty(len(token_ids), weight.size_in, dtype=weight.dtype)
        factor = float(torch.tensor(scale, dtype=out.dtype))
        numbers = (weight.size_in, weight.size_out)
        kind = Kind.EMBED if weight.format is None else Kind.QUANTIZED_EMBED
        self._run(kind, len(token_ids), out, (token_ids, weight.data), numbers, (factor,), format=weight.format)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
        size = x.shape[-1]
        rows = _with_dense_rows(x.reshape(-1, size))
        out = rows.new_empty(rows.shape)
        self._run(Kind.RMS_NORM, len(rows), out, (rows, weight), (size, rows.stride(0), int(unit_offset)), (eps,))
        return out.view(x.shape)

    def rotation(self, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        tokens, half = len(positions), len(frequencies)
        cos, sin = (positions.new_empty(tokens, 2 * half, dtype=torch.float32) for _ in range(2))
        self._run(Kind.ROTATION, tokens, cos, (positions, frequencies, sin), (half,))
        return cos, sin

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tokens, heads, head_dim = x.shape
        if x.stride(2) != 1 or x.stride(1) != head_dim:
            x = x.contiguous()
        out = x.new_empty(x.shape)
        inputs = (x, cos.contiguous(), sin.contiguous())
        self._run(Kind.ROTATE, tokens, out, inputs, (heads, head_dim, x.stride(0)))
        return out

    def store_kv(self, keys: Tensor, values: Tensor, cache: LayerCache, group: GroupTables) -> None:
        inputs = (keys.contiguous(), values.contiguous())
        batch = AttentionBatch((0,), (), (group,))
        self._run(Kind.STORE_KV, len(keys), keys, inputs, cache=cache, batch=batch, group=group)

    def attention(
        self,
        queries: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        group: GroupTables,
        scale: float,
        softcap: float,
    ) -> Tensor:
        queries = queries.contiguous()
        out = torch.empty_like(queries)
        numbers, factors = (queries.shape[1],), (scale, softcap)
        self._run(Kind.ATTENTION, len(queries), out, (queries,), numbers, factors, cache, batch, group)
        return out

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._elementwise(Kind.SILU_AND_MUL, gate, up)

    def gelu_tanh_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._elementwise(Kind.GELU_TANH_AND_MUL, gate, up)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self._elementwise(Kind.ADD, x, y)

    def _elementwise(self, kind: Kind, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        out = torch.empty_like(a)
        self._run(kind, a.shape[0], out, (a, b), (a.shape[1:].numel(),))
        return out

    def _run(
        self,
        kind: Kind,
        rows: int,
        out: Tensor,
        inputs: Sequence[Tensor | None],
        numbers: Sequence[int] = (),
        factors: Sequence[float] = (),
        cache: LayerCache | None = None,
        batch: AttentionBatch | None = None,
        group: GroupTables | None = None,
        format: int | None = None,
    ) -> None:
        _check(out)
        op = Op(kind=kind, type=TYPES[out.dtype], rows=rows, format=format or 0)
        for index, number in enumerate(numbers):
            setattr(op, f"n{index}", number)
        for index, factor in enumerate(factors):
            setattr(op, f"f{index}", factor)
        if cache is not None:
            op.cache = _cache(cache)
        operands = (out, *inputs, *(None,) * (3 - len(inputs)))
        if self.recorder is not None and out.is_meta:
            self.recorder.add(op, operands, group)
        else:
            self._run_now(op, operands, batch, group)

    def _run_now(self, op: Op, operands: Operands, batch: AttentionBatch | None, group: GroupTables | None) -> None:
        for name, tensor in zip(("out", "a", "b", "c"), operands):
            setattr(op, name, None if tensor is None else tensor.data_ptr())
        step = Step(tokens=1)
        if batch is not None and group is not None:
            step = make_step(op.rows, batch.query_start, batch.context_len, (group,))
            op.rows = 1
        self.execute(op, 1, step)

    def execute(self, ops: ctypes.Array[Op] | Op, count: int, step: Step) -> None:
        """Runs operations in order. Raises IndexError for ids and slots that do not exist."""
        error = self._library.paceline_run(self._team, ctypes.byref(ops), count, ctypes.byref(step))
        if error:
            raise IndexError(ERRORS[error])


def _check(tensor: Tensor) -> None:
    if tensor.dtype not in TYPES or tensor.device.type not in ("cpu", "meta"):
        raise ConfigError(
            f"the native kernels compute bfloat16 and float32 on cpu, not {tensor.dtype} on {tensor.device}; "
            "choose --kernels reference"
        )


def _with_dense_rows(x: Tensor) -> Tensor:
    """[rows, size], whose rows are dense and may lie apart."""
    return x if x.stride(1) == 1 else x.contiguous()


def _cache(cache: LayerCache) -> Cache:
    slots, kv_heads, _, head_dim = cache.keys.shape
    slot_stride, head_stride, token_stride, _ = cache.keys.stride()
    return Cache(
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        slots,
        kv_heads,
        head_dim,
        slot_stride,
        head_stride,
        token_stride,
    )
