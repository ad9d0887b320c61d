"""Compile, for GPUs and without a GPU, every kernel that `TritonKernels` launches for the shapes of known models.

    TRITON_INTERPRET=0 python -m tests.kernels.compile_triton ARCHITECTURE [MODEL...]

Launches are only recorded, and tensors have shapes but no content. The command prints a line of JSON for each kernel.
Without the name of a model, it compiles the kernels of all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import KernelParam

from paceline.kernels import select_kernels
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import view_coded_pool, view_pool
from paceline.kernels.choosing import Draw
from paceline.kernels.codes import KVCode
from paceline.kernels.experts import ExpertWeights
from paceline.kernels.interface import HeadNorms, Kernels, NormKind
from paceline.kernels.triton_kernels.blocks import pack_blocks, unpack_blocks

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")

Launch = tuple[triton.JITFunction, tuple[Any, ...], dict[str, Any]]


def launches(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int,
    softcap: float,
    norms: NormKind = NormKind.ROUNDED,
    head_norms: bool = False,
    sinks: bool = False,
    planes: int = 2,
    looks_ahead: bool = False,
    code: KVCode | None = None,
) -> list[Launch]:
    """Return the launches of a layer of this shape for a step with a prompt and a long context, in bf16."""
    recorded: list[Launch] = []

    def record(kernel: triton.JITFunction, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        recorded.append((kernel, args, options))

    triton.JITFunction.run = record
    kernels = select_kernels(torch.device("cuda"), "triton-invariant")
    tokens, hidden, dtype = 101, heads * head_dim, torch.bfloat16
    with torch.device("meta"):
        x, weight = torch.empty(tokens, hidden, dtype=dtype), torch.empty(hidden, hidden, dtype=dtype)
        queries = kernels.linear(x, weight, x[0]).view(tokens, heads, head_dim)
        kernels.rms_norm(x, weight[0], 1e-5, norms)
        kernels.add_rms_norm(x, x, weight[0], 1e-5, norms)
        kernels.silu_and_mul(x, x)
        kernels.gelu_tanh_and_mul(x, x)
        angles = torch.empty(tokens, head_dim)
        kernels.rotate(queries, angles, angles)
        slot_elements = 32 * planes * kv_heads * 16 * head_dim
        pool = torch.empty(40_000 * slot_elements, dtype=dtype)
        cache = view_pool(pool, slot_elements, 32, kv_heads, 16, head_dim, planes)
        if code is not None:
            cache = view_coded_pool(pool, slot_elements * dtype.itemsize, 32, kv_heads, 16, head_dim, code)
        places = torch.empty(tokens, dtype=torch.int64)
        group = GroupTables(16, window, torch.empty(2, 200, dtype=torch.int32), places, places)
        keys = torch.empty(tokens, kv_heads, head_dim, dtype=dtype)
        kernels.store_kv(keys, keys, cache[0], group)
        factors = weight[0, :head_dim]
        own = HeadNorms(factors, factors, 1e-5, norms) if head_norms else None
        kernels.rotate_and_store(queries, keys, keys, angles, angles, cache[0], group, own)
        batch = AttentionBatch((0, 100, 101), (100, 3000), (group,))
        own_sinks = torch.empty(heads) if sinks else None
        kernels.attention(queries, cache[0], batch, group, head_dim**-0.5, softcap, own_sinks)
        if looks_ahead:
            ahead = replace(batch, last_keys=places)
            kernels.attention(queries, cache[0], ahead, group, head_dim**-0.5, softcap, own_sinks, looks_ahead)
        kernels.linear_heads(queries, kernels.pack(torch.empty(heads, 128, head_dim, dtype=dtype)))
        record_experts(kernels)
        record_sampling_and_moving(kernels)
    return recorded


def record_experts(kernels: Kernels) -> None:
    """Launch experts of Qwen 3 30B-A3B, and with biases."""
    tokens, hidden, inner, count, dtype = 5, 2048, 768, 128, torch.bfloat16
    outer, down = torch.empty(inner, hidden, dtype=dtype), torch.empty(hidden, inner, dtype=dtype)
    gates, downs = [kernels.pack(outer)] * count, [kernels.pack(down)] * count
    biases = [torch.empty(count, size, dtype=dtype) for size in (inner, inner, hidden)]
    table, ids = torch.empty(6, count, dtype=torch.int64), torch.empty(tokens, 8, dtype=torch.int64)
    for own in (biases, (None, None, None)):
        experts = ExpertWeights(gates, gates, downs, "silu", *own, table=table)
        kernels.experts(torch.empty(tokens, hidden, dtype=dtype), ids, torch.empty(tokens, 8), experts)


def record_sampling_and_moving(kernels: Kernels) -> None:
    chooser = kernels.chooser
    assert chooser is not None
    logits, tokens = torch.empty(3, 128_256), torch.empty(3, dtype=torch.int64)
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 40)):
        chooser.choose(logits, range(3), [Draw(temperature, top_k, 0.0, 1.0, 1, 1)] * 3)
    chooser.accept(tokens, tokens, (0, 1, 3))
    pool = torch.empty(9, 32 * 2 * 8 * 16 * 128, dtype=torch.bfloat16)
    unpack_blocks(pack_blocks(pool, tokens), pool, tokens)


def compile_launch(
    architecture: int, kernel: triton.JITFunction, args: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Compile a launch with its types and options, and return the result."""
    values = dict(zip(kernel.arg_names, args)) | {k: v for k, v in options.items() if k in kernel.arg_names}
    constants = {param.name: values[param.name] for param in kernel.params if param.is_constexpr}
    signature = {name: "constexpr" if name in constants else _type_of(values[name]) for name in kernel.arg_names}
    aligned = [["tt.divisibility", 16]]
    attributes = {(param.num,): aligned for param in kernel.params if _is_aligned(param, values[param.name])}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", architecture, 32),
        options={name: options[name] for name in _OPTIONS if name in options},
    )
    return {
        "kernel": kernel.__name__,
        "architecture": architecture,
        "code": constants.get("CODE", 0),
        "shared_bytes": compiled.metadata.shared,
        "byte_loads": compiled.asm["ptx"].count("ld.global.b8"),
        "wide_copies": compiled.asm["ptx"].count("cp.async.cg"),  # instructions that copy 16 bytes to shared memory
    }


def _is_aligned(param: KernelParam, value: object) -> bool:
    """Return whether a launch tells the compiler that the argument is a multiple of 16."""
    if param.is_constexpr or param.do_not_specialize or param.do_not_specialize_on_alignment:
        return False
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


_ATTENTION = ("attend", "combine")
_CODED = ("attend", "store_codes")
_DIFFERING = (*_ATTENTION, "rms_norm", "add_rms_norm", "rotate", "rotate_and_store")
MODELS: dict[str, tuple[Callable[[], list[Launch]], tuple[str, ...]]] = {
    "llama": (lambda: launches(32, 8, 128, 0, 0.0), ()),
    "gemma3": (
        lambda: launches(4, 1, 256, 512, 50.0, NormKind.UNIT_OFFSET, head_norms=True, looks_ahead=True),
        _DIFFERING,
    ),
    "gemma4": (lambda: launches(8, 1, 512, 0, 0.0, NormKind.WIDE, head_norms=True), _DIFFERING),
    "gpt_oss": (lambda: launches(64, 8, 64, 128, 0.0, sinks=True), _ATTENTION),
    "int8": (lambda: launches(32, 8, 128, 0, 0.0, code=KVCode.INT8), _CODED),
    "fp8_e4m3": (lambda: launches(4, 1, 256, 512, 0.0, code=KVCode.FP8_E4M3), _CODED),
    # The queries of all heads are tokens of one KV head here, whose vectors are keys and values.
    "deepseek": (lambda: launches(16, 1, 576, 0, 0.0, planes=1), (*_ATTENTION, "store_kv", "matmul")),
}
"""The launches of each model, and the kernels that differ from those of llama."""


def main() -> None:
    architecture = int(sys.argv[1])
    for name in sys.argv[2:] or MODELS:
        record, differing = MODELS[name]
        for launch in record():
            if not differing or launch[0].__name__ in differing:
                print(json.dumps(compile_launch(architecture, *launch)), flush=True)


if __name__ == "__main__":
    main()
