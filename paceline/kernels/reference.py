"""`Kernels` in plain torch, for any device. Tests compare other backends with it; it runs if no other backend can."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.turns import Turns
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerCache
from paceline.kernels.composed import Composed
from paceline.kernels.interface import Forward, NormKind
from paceline.kernels.packed_weight import Allocate, PackedWeight
from paceline.kernels.quantized import QuantizedMatrix, QuantizedRows, multiply_bytes
from paceline.kernels.reference_caches import gather_context, store_codes
from paceline.kernels.reference_experts import ReferenceExperts
from paceline.kernels.reference_recurrence import ReferenceRecurrence

_BYTES = 1
"""The format of a matrix with an `input_scale`, fp32: its values, then for each output its scale and the scale of x."""


class ReferenceKernels(ReferenceExperts, ReferenceRecurrence, Composed):
    """`Kernels` in plain torch.

    Row-wise operations and attention of a row do not depend on other rows of the batch. `linear` is the vendor's matrix
    product, whose order of summation may change with the number of rows.
    """

    name = "reference"
    packing = quantized_packing = ""

    def take_turns(self, turns: Turns) -> None:
        pass

    def compile(self, forward: Forward) -> Forward:
        return forward

    def pack(self, weight: Tensor | QuantizedMatrix | QuantizedRows, allocate: Allocate | None = None) -> PackedWeight:
        if isinstance(weight, QuantizedRows):
            weight = weight[:]
        if isinstance(weight, QuantizedMatrix):
            if weight.input_scale is not None:
                fixed = torch.full_like(weight.scales, weight.input_scale)
                data = torch.cat((weight.values.float(), weight.scales, fixed), 1)
                return PackedWeight(data, *weight.shape, weight.dtype, _BYTES)
            weight = weight.dequantize()
        *heads, size_out, size_in = weight.shape
        return PackedWeight(weight.contiguous(), size_out, size_in, weight.dtype, heads=heads[0] if heads else None)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        if weight.format != _BYTES:
            return F.linear(x, weight.data, bias)
        values, scales, fixed = weight.data[:, :-2], weight.data[:, -2:-1], float(weight.data[0, -1])
        product = multiply_bytes(x.reshape(-1, weight.size_in), values, scales, fixed).view(*x.shape[:-1], -1)
        return (product if bias is None else product + bias.float()).to(x.dtype)

    def embed(self, token_ids: Tensor, weight: PackedWeight, scale: float = 1.0) -> Tensor:
        rows = F.embedding(token_ids, weight.data)
        if weight.format == _BYTES:
            rows = (rows[:, :-2] * rows[:, -2:-1]).to(weight.dtype)
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, kind: NormKind = NormKind.ROUNDED) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if kind == NormKind.ROUNDED:
            return normed.to(x.dtype) * weight
        offset = 1.0 if kind == NormKind.UNIT_OFFSET else 0.0
        return (normed * (offset + weight.float())).to(x.dtype)

    def rotation(
        self,
        positions: Tensor,
        frequencies: Tensor,
        scale: float = 1.0,
        growth: float = 0.0,
        growth_tokens: int = 1,
    ) -> tuple[Tensor, Tensor]:
        half = positions.float().unsqueeze(1) * frequencies
        angles = torch.cat((half, half), dim=-1)
        factor: float | Tensor = scale
        if growth:
            factor = scale * (1.0 + growth * (1 + positions // growth_tokens).float().log().unsqueeze(1))
        factor = torch.where(frequencies.repeat(2) == 0.0, 1.0, factor)
        return angles.cos() * factor, angles.sin() * factor

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x.float()
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (wide * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).to(x.dtype)

    def store_kv(self, keys: Tensor, values: Tensor, cache: LayerCache, group: GroupTables) -> None:
        if cache.scales is not None:
            store_codes(keys, values, cache, cache.scales, group)
        else:
            cache.keys[group.write_slots, :, group.write_offsets] = keys
            cache.values[group.write_slots, :, group.write_offsets] = values

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
        out = torch.empty_like(queries)
        last_keys = batch.last_keys if looks_ahead else None
        # One request at a time, so that its result cannot depend on the batch.
        for request, context_len in enumerate(batch.context_len):
            start, end = batch.query_start[request], batch.query_start[request + 1]
            if start == end:
                continue
            first_key = _first_visible_key(context_len - (end - start), group.window)
            keys, values = gather_context(cache, group, request, first_key, context_len)
            mask = None
            if end - start > 1:
                positions = torch.arange(context_len - (end - start), context_len, device=queries.device)
                last = positions if last_keys is None else last_keys[start:end]
                if both_sides and group.window:
                    last = last.minimum(positions + group.window - 1)
                mask = _mask(positions, last, first_key, context_len, group.window)
            own = queries[start:end].to(keys.dtype)  # numbers of 8-bit codes are fp32
            out[start:end] = _attend(own, keys, values, mask, scale, softcap, sinks)
        return out

    def silu_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def gelu_tanh_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def linear_heads(self, x: Tensor, weight: PackedWeight) -> Tensor:
        return torch.bmm(x.transpose(0, 1), weight.data.mT).transpose(0, 1).contiguous()

    def concat(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x, y), dim=-1)

    def sigmoid_and_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.sigmoid(gate) * up


def _first_visible_key(position: int, window: int) -> int:
    """Return the position of the first key that a query at `position` attends to."""
    return max(0, position - window + 1) if window else 0


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention of the last `count` tokens of one context.

    Args:
        queries: [count, heads, head_dim].
        keys, values: [kv_heads, visible, head_dim]; the last `count` belong to the queries' tokens.
        mask: bool [count, visible]: the keys that each query sees; None if it sees all.
        sinks: fp32 [heads].

    Returns:
        [count, heads, head_dim].
    """
    count, heads, head_dim = queries.shape
    kv_heads = len(keys)
    per_kv_head = heads // kv_heads
    # The query heads that share a KV head become rows over the same keys, so that no key is copied.
    rows = queries.view(count, kv_heads, per_kv_head, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    mask = None if mask is None else mask.repeat(per_kv_head, 1)
    if softcap or sinks is not None:
        sink_scores = None if sinks is None else sinks.repeat_interleave(count).view(kv_heads, -1, 1)
        attended = _attention_by_scores(rows, keys, values, mask, scale, softcap, sink_scores)
    else:
        # torch's fused kernels need the leading dimension of 1.
        attended = F.scaled_dot_product_attention(rows[None], keys[None], values[None], mask, scale=scale)[0]
    return attended.view(kv_heads, per_kv_head, count, head_dim).permute(2, 0, 1, 3).reshape(count, heads, head_dim)


def _mask(positions: Tensor, last_keys: Tensor, first_key: int, end_key: int, window: int) -> Tensor:
    """Return which of the keys [first_key, end_key) each query sees: bool [queries, keys].

    Args:
        positions, last_keys: int64 [queries]: the query's position, and that of the last key that it sees.
    """
    keys = torch.arange(first_key, end_key, device=positions.device)
    mask = keys <= last_keys.unsqueeze(1)
    return mask & (keys > positions.unsqueeze(1) - window) if window else mask


def _attention_by_scores(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention that torch's fused kernels do not compute. `sinks` are fp32 [kv_heads, rows, 1]."""
    scores = rows.float() @ keys.float().mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
    return (weights @ values.float()).to(rows.dtype)
