"""`Kernels` in C++ for CPUs: matrix products at memory speed, and results of a row that never depend on its batch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerCache
from paceline.kernels.composed import Composed
from paceline.kernels.interface import Forward, Logits, NormKind
from paceline.kernels.native.adapters import NativeAdapters
from paceline.kernels.native.caches import cache_format, kernel_cache
from paceline.kernels.native.chooser import NativeChooser
from paceline.kernels.native.encoding import NativeEncoding
from paceline.kernels.native.experts import NativeExperts
from paceline.kernels.native.library import (
    COMPRESSED,
    TYPES,
    Cache,
    KernelKind,
    Op,
    library_digest,
)
from paceline.kernels.native.memory import WeightMemory
from paceline.kernels.native.operations import check, ints, need, with_dense_rows
from paceline.kernels.native.recurrence import NativeRecurrence
from paceline.kernels.native.replay import Replay
from paceline.kernels.native.tiles import pack_tiles, tile_format, tiles_bytes
from paceline.kernels.packed_weight import Allocate, PackedWeight
from paceline.kernels.quantized import QuantizedMatrix, QuantizedRows

COMPRESSING = ("avx512-bf16",)
"""Instruction sets whose kernels can read bf16 weights that are stored in 12 bits. AMX kernels would first have to
write the weights out in 16 bits.
"""
INTEGER_PRODUCTS = ("avx512-bf16", "avx512", "avx2")
"""Instruction sets that multiply bf16 with quantized weights in integers, without rounding the weights to bf16."""


class NativeKernels(NativeAdapters, NativeEncoding, NativeExperts, NativeRecurrence, Composed):
    """`Kernels` in bf16 and fp32 on a CPU, with a team of threads of its own.

    Each row of a result is computed in an order that depends only on the shapes of the weights. So a row has the same
    bits in any batch, in any chunk of a prompt, and on any number of threads. The bits may differ between instruction
    sets.

    Args:
        threads: number of threads that compute together, including the calling one. The system may give fewer.
        instruction_set: the name of an instruction set, or "auto" for the best that runs here.
        compress: whether to keep bf16 matrices in 12 bits, if the kernels of the instruction set can read them.

    Raises:
        ConfigError: the library is not compiled, or the instruction set does not run here.
    """

    name = "native"

    def __init__(self, threads: int, instruction_set: str = "auto", compress: bool = True) -> None:
        super().__init__(threads, instruction_set)
        self._memory = WeightMemory(self._library)
        self.compresses = compress and self.instruction_set in COMPRESSING
        self.packing = f"native-{library_digest()}" + ("-compressed" if self.compresses else "")
        # Kernels with AMX read nibbles in an order of their own.
        self.quantized_packing = self.packing + ("-amx" if self.instruction_set == "amx" else "")

    def aside(self) -> NativeKernels:
        return NativeKernels(1, self.instruction_set, self.compresses)

    @property
    def chooser(self) -> NativeChooser:
        return NativeChooser(self)

    def compile(self, forward: Forward) -> Forward:
        return Replay(forward, self)

    def pack(self, weight: Tensor | QuantizedMatrix | QuantizedRows, allocate: Allocate | None = None) -> PackedWeight:
        allocate = allocate or self._memory.take
        *_, out, size_in = weight.shape
        if isinstance(weight, (QuantizedMatrix, QuantizedRows)):
            how = tile_format(weight[:1], self.instruction_set)
            tiles = allocate(tiles_bytes(how, out, size_in))
            pack_tiles(weight, how, tiles)
            return PackedWeight(tiles, out, size_in, weight.dtype, how)
        heads = len(weight) if weight.dim() == 3 else None
        if weight.is_meta:
            return PackedWeight(weight, out, size_in, weight.dtype, heads=heads)
        check(weight)
        kind, weight = TYPES[weight.dtype], weight.contiguous()
        if heads is None and self.compresses and weight.dtype == torch.bfloat16:
            coding = ctypes.create_string_buffer(self._library.paceline_coding_bytes())
            size = self._library.paceline_choose_coding(weight.data_ptr(), out, size_in, coding)
            if size:
                data = allocate(size)
                self._library.paceline_compress(coding, weight.data_ptr(), out, size_in, data.data_ptr())
                return PackedWeight(data, out, size_in, weight.dtype, COMPRESSED)
        packed_bytes = self._library.paceline_packed_bytes(kind, out, size_in)
        data = allocate((heads or 1) * packed_bytes).view(weight.dtype)
        for index, matrix in enumerate(weight.view(-1, out, size_in)):
            self._library.paceline_pack(kind, matrix.data_ptr(), out, size_in, data.data_ptr() + index * packed_bytes)
        return PackedWeight(data, out, size_in, weight.dtype, heads=heads)

    def fits(self, weight: PackedWeight) -> bool:
        data, out, size_in = weight.data, weight.size_out, weight.size_in
        if weight.format == COMPRESSED:
            return bool(self._library.paceline_is_compressed(data.data_ptr(), data.nbytes, out, size_in))
        if weight.format is not None:
            return data.nbytes == tiles_bytes(weight.format, out, size_in)
        whole: int = self._library.paceline_packed_bytes(TYPES[weight.dtype], out, size_in)
        return data.nbytes == whole * (weight.heads or 1)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            need("the bias", bias, x.dtype, weight.size_out)
        return self.multiply(KernelKind.LINEAR, x, weight, bias, x.dtype)

    def logits(self, x: Tensor, weight: PackedWeight) -> Logits:
        best = x.new_empty(len(x), dtype=torch.int64)
        return Logits(self.multiply(KernelKind.LOGITS, x, weight, best, torch.float32), best)

    def embed(self, token_ids: Tensor, weight: PackedWeight, scale: float = 1.0) -> Tensor:
        token_ids = ints("token ids", token_ids)
        out = token_ids.new_empty(len(token_ids), weight.size_in, dtype=weight.dtype)
        factor = float(torch.tensor(scale, dtype=out.dtype))
        op = Op(KernelKind.EMBED, rows=len(token_ids), n0=weight.size_in, n1=weight.size_out, f0=factor)
        op.format = weight.format or 0
        self.run(op, out, (token_ids, weight.data))
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, kind: NormKind = NormKind.ROUNDED) -> Tensor:
        size = x.shape[-1]
        need("the norm's weight", weight, x.dtype, size)
        rows = with_dense_rows(x.reshape(-1, size))
        out = rows.new_empty(rows.shape)
        op = Op(KernelKind.RMS_NORM, rows=len(rows), n0=size, n1=rows.stride(0), n2=kind, f0=eps)
        self.run(op, out, (rows, weight))
        return out.view(x.shape)

    def rotation(
        self,
        positions: Tensor,
        frequencies: Tensor,
        scale: float = 1.0,
        growth: float = 0.0,
        growth_tokens: int = 1,
    ) -> tuple[Tensor, Tensor]:
        tokens, half = len(positions), len(frequencies)
        need("the frequencies", frequencies, torch.float32, half)
        cos, sin = (positions.new_empty(tokens, 2 * half, dtype=torch.float32) for _ in range(2))
        op = Op(KernelKind.ROTATION, rows=tokens, n0=half, n1=growth_tokens, f0=scale, f1=growth)
        self.run(op, cos, (ints("positions", positions), frequencies, sin))
        return cos, sin

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        tokens, heads, head_dim = x.shape
        for angles in (cos, sin):
            need("cos or sin", angles, torch.float32, tokens, head_dim)
        if x.stride(2) != 1 or x.stride(1) != head_dim:
            x = x.contiguous()
        out = x.new_empty(x.shape)
        op = Op(KernelKind.ROTATE, rows=tokens, n0=heads, n1=head_dim, n2=x.stride(0))
        self.run(op, out, (x, cos.contiguous(), sin.contiguous()))
        return out

    def store_kv(self, keys: Tensor, values: Tensor, cache: LayerCache, group: GroupTables) -> None:
        need("values", values, keys.dtype, *keys.shape)
        op = Op(KernelKind.STORE_KV, rows=len(keys), cache=kernel_cache(cache, keys, group), format=cache_format(cache))
        keys = keys.contiguous()
        self.run(op, keys, (keys, values.contiguous()), AttentionBatch((0,), (), (group,)), group)

    def attention(
        self,
        queries: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        group: GroupTables,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        looks_ahead: bool = False,
        both_sides: bool = False,
    ) -> Tensor:
        queries = queries.contiguous()
        out = queries.new_empty(queries.shape)
        tokens, heads, _ = queries.shape
        if sinks is not None:
            need("the sinks", sinks, torch.float32, heads)
        op = Op(KernelKind.ATTENTION, rows=tokens, n0=heads, n1=looks_ahead, n2=both_sides, f0=scale, f1=softcap)
        op.cache, op.format = kernel_cache(cache, queries, group), cache_format(cache)
        self.run(op, out, (queries, sinks), batch, group)
        return out

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.elementwise(KernelKind.SILU_AND_MUL, gate, up)

    def gelu_tanh_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.elementwise(KernelKind.GELU_TANH_AND_MUL, gate, up)

    def sigmoid_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.elementwise(KernelKind.SIGMOID_AND_MUL, gate, up)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self.elementwise(KernelKind.ADD, x, y)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape)
        self.run(Op(KernelKind.SCALE, rows=x.shape[0], n0=x.shape[1:].numel(), f0=factor), out, (x,))
        return out

    def linear_heads(self, x: Tensor, weight: PackedWeight) -> Tensor:
        tokens, heads, size_in = x.shape
        if weight.heads != heads or size_in != weight.size_in or x.dtype != weight.dtype:
            wanted = f"[tokens, {weight.heads}, {weight.size_in}] {weight.dtype}"
            raise ValueError(f"x is {list(x.shape)} {x.dtype}; the weight takes {wanted}")
        if x.stride(2) != 1 or x.stride(0) != heads * x.stride(1):
            x = x.contiguous()
        out = x.new_empty(tokens, heads, weight.size_out)
        cache = Cache(kv_heads=heads)
        op = Op(KernelKind.LINEAR_HEADS, rows=tokens, n0=size_in, n1=weight.size_out, n2=x.stride(1), cache=cache)
        self.run(op, out, (x, weight.data))
        return out

    def concat(self, x: Tensor, y: Tensor) -> Tensor:
        need("the second operand", y, x.dtype, *x.shape[:2], y.shape[2])
        x, y = x.contiguous(), y.contiguous()
        out = x.new_empty(*x.shape[:2], x.shape[2] + y.shape[2])
        self.run(Op(KernelKind.CONCAT, rows=x.shape[0] * x.shape[1], n0=x.shape[2], n1=y.shape[2]), out, (x, y))
        return out
