"""`Kernels` in Triton. This package launches the kernels; the code that runs on the GPU is in `device`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.kernels.adapters import AdaptedLayer
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerCache
from paceline.kernels.encoding import Tower
from paceline.kernels.experts import ExpertWeights, clamped_swiglu
from paceline.kernels.interface import Forward, HeadNorms, NormKind
from paceline.kernels.packed_weight import Allocate, PackedWeight
from paceline.kernels.quantized import QuantizedMatrix, QuantizedRows
from paceline.kernels.reference import ReferenceKernels
from paceline.kernels.triton_kernels import adapters, rowwise
from paceline.kernels.triton_kernels.attention import AttentionPlan, attention, make_plan, tile_rows
from paceline.kernels.triton_kernels.device import INTERPRETED, matmul
from paceline.kernels.triton_kernels.experts import experts as compute_experts
from paceline.kernels.triton_kernels.experts import index_experts
from paceline.kernels.triton_kernels.graphs import CalledAgain, CudaRecorder, Graphs
from paceline.kernels.triton_kernels.sampling import TritonChooser
from paceline.kernels.triton_kernels.tower_graphs import TowerGraphs
from paceline.kernels.triton_kernels.tuning import Untuned, gpu_tuner


class TritonKernels(ReferenceKernels):
    """`Kernels` for tensors of one GPU. Operations that are rare and limited by memory bandwidth are in plain torch.

    A row does not depend on other rows of its batch, on how its prompt was cut into chunks, or on drafts. `linear` is
    an exception: the vendor's matrix product may add in another order when the number of rows changes.

    Args:
        batch_invariant: compute `linear` in a kernel of Paceline's own, which always adds in the same order.

    Raises:
        ConfigError: `device` is not a GPU. Triton's interpreter allows a CPU instead, for tests.
    """

    def __init__(self, device: torch.device, batch_invariant: bool = False) -> None:
        if device.type != ("cpu" if INTERPRETED else "cuda"):
            raise ConfigError(
                f"the triton kernels cannot run on {device.type}: they need a cuda device, or, for tests on a CPU, "
                "TRITON_INTERPRET=1 in the environment"
            )
        self.name = "triton-invariant" if batch_invariant else "triton"
        self._tuner = gpu_tuner(device) if device.type == "cuda" and torch.cuda.is_available() else Untuned()
        self._batch_invariant = batch_invariant
        self._planned: AttentionBatch | None = None
        self._plans: dict[tuple[int, int], AttentionPlan] = {}
        """Plans of the last batch, by the number of query heads per KV head and the rows of a tile. Layers of a step
        share them. Each batch has a new dict, which a recording can keep."""

    @property
    def chooser(self) -> TritonChooser:
        return TritonChooser()

    def compile(self, forward: Forward) -> Forward:
        return Graphs(forward, (lambda: CalledAgain) if INTERPRETED else CudaRecorder, lambda: self._plans)

    def compile_tower(self, tower: Tower) -> Tower:
        return TowerGraphs(tower, (lambda: CalledAgain) if INTERPRETED else CudaRecorder)

    def pack(self, weight: Tensor | QuantizedMatrix | QuantizedRows, allocate: Allocate | None = None) -> PackedWeight:
        if isinstance(weight, QuantizedMatrix) and weight.input_scale is not None:
            raise ConfigError(
                "the triton kernels do not round activations to bytes, as this checkpoint's format (W8A8) asks; choose "
                "--quantization none, which keeps activations as they are"
            )
        if isinstance(weight, (QuantizedMatrix, QuantizedRows)):
            raise ConfigError("the triton kernels take no quantized weights; choose --quantization none")
        return super().pack(weight, allocate)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        return _invariant_linear(x, weight.data, bias) if self._batch_invariant else super().linear(x, weight, bias)

    def router_logits(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        if not self._batch_invariant:
            return super().router_logits(x, weight, bias)
        return _invariant_linear(x, weight.data, bias, torch.float32)

    def linear_heads(self, x: Tensor, weight: PackedWeight) -> Tensor:
        return _invariant_heads(x, weight.data) if self._batch_invariant else super().linear_heads(x, weight)

    def adapt(self, y: Tensor, x: Tensor, layer: AdaptedLayer, rows: Tensor) -> None:
        adapters.adapt(y, x, layer, rows)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, kind: NormKind = NormKind.ROUNDED) -> Tensor:
        return rowwise.rms_norm(x, weight, eps, kind)

    def add_rms_norm(
        self, x: Tensor, y: Tensor, weight: Tensor, eps: float, kind: NormKind = NormKind.ROUNDED
    ) -> tuple[Tensor, Tensor]:
        return rowwise.add_rms_norm(x, y, weight, eps, kind)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rowwise.rotate(x, cos, sin)

    def store_kv(self, keys: Tensor, values: Tensor, cache: LayerCache, group: GroupTables) -> None:
        rowwise.store_kv(keys, values, cache, group)

    def rotate_and_store(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        group: GroupTables,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        if cache.scales is not None:
            return super().rotate_and_store(queries, keys, values, cos, sin, cache, group, norms)
        return rowwise.rotate_and_store(queries, keys, values, cos, sin, cache, group, norms)

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
        shape = queries.shape[1] // cache.keys.shape[1], tile_rows(queries.shape[2])
        if self._planned is not batch:
            self._planned, self._plans = batch, {}
        if shape not in self._plans:
            self._plans[shape] = make_plan(batch, *shape, queries.device)
        return attention(queries, cache, self._plans[shape], group, scale, softcap, sinks, looks_ahead, both_sides)

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return rowwise.gated(gate, up, False, self._tuner)

    def gelu_tanh_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return rowwise.gated(gate, up, True, self._tuner)

    def index_experts(self, experts: ExpertWeights) -> ExpertWeights:
        return index_experts(experts)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        activate = {
            "silu": self.silu_and_mul,
            "gelu_tanh": self.gelu_tanh_and_mul,
            "clamped_swiglu": clamped_swiglu,
        }
        return compute_experts(x, ids, weights, experts, activate[experts.activation])


def _invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Compute F.linear of x [tokens, in] and weight [out, in]. Tiles have the same shape for any number of tokens.

    Args:
        dtype: of the result; by default that of x.
    """
    out = torch.empty(len(x), len(weight), dtype=dtype or x.dtype, device=x.device)
    _multiply(out.unsqueeze(1), x.unsqueeze(1), weight.unsqueeze(0), bias)
    return out


def _invariant_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the products of x [tokens, heads, in] and weight [heads, out, in] in the same way."""
    out = torch.empty(len(x), *weight.shape[:2], dtype=x.dtype, device=x.device)
    _multiply(out, x, weight, None)
    return out


def _multiply(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Compute out [tokens, heads, out], contiguous."""
    x = x if x.stride(2) == 1 else x.contiguous()
    assert weight.stride(2) == 1
    heads, size_out, size_in = weight.shape
    tile = {"ROWS": 64, "COLUMNS": 64, "STEP": 128 // x.itemsize}
    matmul.matmul[triton.cdiv(len(x), tile["ROWS"]), triton.cdiv(size_out, tile["COLUMNS"]), heads](
        out,
        x,
        weight,
        weight if bias is None else bias,
        len(x),
        x.stride(0),
        weight.stride(1),
        out.stride(0),
        x.stride(1),
        weight.stride(0),
        SIZE_IN=size_in,
        SIZE_OUT=size_out,
        BIAS=bias is not None,
        INTERPRETED=INTERPRETED,
        num_stages=4,
        **tile,
    )
