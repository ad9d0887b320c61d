"""The launch of the kernels whose results for a token do not depend on other tokens. `Kernels` describes their results.

A slot below 0 marks a padding token, which is not stored.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paceline.kernels.batch import GroupTables
from paceline.kernels.caches import LayerCache
from paceline.kernels.interface import HeadNorms, NormKind
from paceline.kernels.triton_kernels.device import codes as device_codes
from paceline.kernels.triton_kernels.device import rowwise as device
from paceline.kernels.triton_kernels.tuning import Options, Tuner, Untuned

GATED_CHOICES: tuple[Options, ...] = (
    {"BLOCK": 1024, "num_warps": 4},
    {"BLOCK": 512, "num_warps": 4},
    {"BLOCK": 2048, "num_warps": 4},
    {"BLOCK": 2048, "num_warps": 8},
    {"BLOCK": 4096, "num_warps": 8},
)
"""Launch options among which the fastest is chosen. Results do not depend on the choice, because each element is
computed by itself. Kernels with sums have no choice.
"""
_NORM_WARP = 256
"""Number of elements of a row for each warp. Another number of warps would add in another order."""
_MAX_WARPS = 16
_EXACT = {"enable_fp_fusion": False}
"""Launch option of fused kernels and of the kernels that they replace, because both must compute the same bits."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    device.rms_norm[x.numel() // size,](out, x, weight, eps, KIND=int(kind), **_norm_shape(size))
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, kind: NormKind) -> tuple[Tensor, Tensor]:
    assert x.shape == y.shape
    x, y = x.contiguous(), y.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    grid = (x.numel() // size,)
    device.add_rms_norm[grid](total, out, x, y, weight, eps, KIND=int(kind), **_norm_shape(size))
    return total, out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, heads, head_dim = x.shape
    x = _with_dense_heads(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    device.rotate[tokens,](
        out,
        x,
        cos.contiguous(),
        sin.contiguous(),
        x.stride(0),
        x.stride(1),
        HEADS=heads,
        PADDED_HEADS=triton.next_power_of_2(heads),
        HALF=head_dim // 2,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        **_EXACT,
    )
    return out


def store_kv(keys: Tensor, values: Tensor, cache: LayerCache, group: GroupTables) -> None:
    tokens, heads, head_dim = keys.shape
    keys, values = _with_dense_heads(keys), _with_dense_heads(values)
    sources = (keys, values, group.write_slots, group.write_offsets)
    strides = (*cache_strides(cache), *keys.stride()[:2], *values.stride()[:2])
    shape = {"HEADS": heads, "PADDED_HEADS": triton.next_power_of_2(heads), "HEAD_DIM": head_dim}
    shape["DIM"] = triton.next_power_of_2(head_dim)
    if cache.scales is None:
        device.store_kv[tokens,](cache.keys, cache.values, *sources, *strides, **shape)
        return
    planes = (cache.keys, cache.values, cache.scales.keys, cache.scales.values)
    device_codes.store_codes[tokens,](*planes, *sources, *strides, CODE=int(cache.scales.code), **shape)


def rotate_and_store(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    group: GroupTables,
    norms: HeadNorms | None,
) -> Tensor:
    tokens, heads, head_dim = queries.shape
    queries, keys, values = (_with_dense_heads(x) for x in (queries, keys, values))
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    # Without norms, `cos` stands in for their weights, which the kernel does not read.
    query_norm, key_norm, eps = (norms.queries, norms.keys, norms.eps) if norms is not None else (cos, cos, 0.0)
    padded = triton.next_power_of_2(head_dim)
    device.rotate_and_store[tokens, heads + keys.shape[1]](
        out,
        cache.keys,
        cache.values,
        queries,
        keys,
        values,
        cos.contiguous(),
        sin.contiguous(),
        query_norm,
        key_norm,
        group.write_slots,
        group.write_offsets,
        eps,
        *cache_strides(cache),
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        HEADS=heads,
        HALF=head_dim // 2,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        PADDED=padded,
        NORMS=norms is not None,
        KIND=int(norms.kind) if norms is not None else 0,
        num_warps=_norm_warps(padded),
        **_EXACT,
    )
    return out


def gated(gate: Tensor, up: Tensor, gelu: bool, tuner: Tuner | Untuned) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    size = gate.numel()

    def launch(options: Options) -> None:
        device.gated[triton.cdiv(size, options["BLOCK"]),](out, gate, up, size, GELU=gelu, **options, **_EXACT)

    shape = f"{triton.next_power_of_2(size)} {gate.dtype} {'gelu' if gelu else 'silu'}"
    launch(tuner.best("gated", shape, GATED_CHOICES, launch))
    return out


def _norm_shape(size: int) -> dict[str, int]:
    padded = triton.next_power_of_2(size)
    return {"SIZE": size, "PADDED": padded, "num_warps": _norm_warps(padded), **_EXACT}


def _norm_warps(padded: int) -> int:
    """Return the number of warps, from the row's length only: another number would add in another order."""
    return min(_MAX_WARPS, max(1, padded // _NORM_WARP))


def _with_dense_heads(x: Tensor) -> Tensor:
    """Return x [tokens, heads, head_dim] with dense heads. The heads may be apart from each other."""
    return x if x.stride(2) == 1 else x.contiguous()


def cache_strides(cache: LayerCache) -> tuple[int, ...]:
    """Return the strides of slots, heads, and positions in a block or tiles, which keys and values have in common."""
    strides = cache.keys.stride()[:3]
    assert cache.values.stride()[:3] == strides
    if cache.scales is None:
        assert cache.keys.stride(3) == cache.values.stride(3) == 1
        return strides
    for scales in (cache.scales.keys, cache.scales.values):
        assert tuple(2 * stride for stride in scales.stride()[:3]) == strides
    return strides
