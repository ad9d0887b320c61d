"""Time of each CPU kernel, compared with plain torch and with a floor, at the shapes of real models.

    python -m bench.compute.kernels [--threads 2] [--rounds 30] [--dtype bfloat16] [--quantization int8]

The floor is the larger of two times: bytes to read divided by the rate of reading, and operations divided by the rate
of computing. Plain loops of the same instruction set measure both rates first (see floors.py). The bytes of weights
are those that the native kernels read, after quantization or compression. The operations are products of fp32, bf16 or
16-bit integers, as the native kernels use. Attention of one token for each request is compared with a loop that reads
its blocks. Native and torch take turns, and times are medians. With one thread they are CPU time, which other work on
the machine hardly changes; with more threads they are wall time. There are as many copies of the weights as a model
has, so that they are read from memory. Linear layers run as one pass over all copies, as in a step. --quantization
rounds weights for the native kernels only: torch stays the same.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.compute.blocks import BLOCKS, K_BLOCK
from bench.compute.floors import Floors, Rates
from bench.compute.small_floats import quantize_fp8, quantize_mxfp4, quantize_mxfp8, quantize_nf4, quantize_nvfp4
from paceline.core.types import SamplingParams
from paceline.engine.sampler import SamplingRow, as_draw, sample
from paceline.kernels import rounds_blocks
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.caches import LayerState, RecurrentState, view_pool, view_states
from paceline.kernels.interface import ForwardInputs, Kernels
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import COMPRESSED
from paceline.kernels.native.tiles import BYTE_INPUT, must_unpack
from paceline.kernels.packed_weight import PackedWeight
from paceline.kernels.quantized import BLOCK, QuantizedMatrix, quantize_int8
from paceline.kernels.reference import ReferenceKernels
from paceline.models.model_config import Mamba
from paceline.services.common.shared_memory import map_shared, take_huge_pages

COPIES_BYTES = 200 << 20
BLOCK_TOKENS = 16
READ_ROUNDS = 5
"""Measurements of reading blocks; the median counts."""
SPINNING_SECONDS = 0.02
"""Pause before each run. After their work torch's threads spin for a while, on cores that the next run needs."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that decide how its kernels run."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


MODELS = (
    Shape("smollm2-135m", 576, 1536, 9, 3, 64, 49152),
    Shape("gemma-3-270m", 640, 2048, 4, 1, 256, 262144),
    Shape("llama-3.2-1b", 2048, 8192, 32, 8, 64, 128256),
)


HYBRID = "granite-4-h-350m", Mamba(heads=48, head_dim=32, state_size=128, conv_taps=4, conv_bias=True, bias=False)


@dataclass(frozen=True)
class Case:
    """One kernel at one shape. `make` prepares a backend's run; each call reads `read_bytes` and does `operations`."""

    name: str
    rows: str
    make: Callable[[Kernels], Callable[[], object]]
    read_bytes: float
    operations: float = 0.0
    calls: int = 1
    """Calls in one run."""
    weight: Callable[[Kernels], PackedWeight] | None = None
    """Packs the weight of a linear layer, which may have fewer bytes than `read_bytes`."""
    read: Callable[[Floors], float] | None = None
    """If the order of reading matters: returns the seconds in which a plain loop reads what one call reads."""

    def floor(self, native: NativeKernels, floors: Floors, rates: Rates, dtype: torch.dtype) -> float:
        """Return the least seconds of a call."""
        read_bytes, rate = self.read_bytes, rates.bf16 if dtype == torch.bfloat16 and rates.bf16 else rates.fp32
        if self.weight is not None:
            weight = self.weight(native)
            read_bytes = weight.data.nbytes
            if weight.format not in (None, COMPRESSED) and not (
                rounds_blocks(native, dtype) or must_unpack(weight.format)
            ):
                rate = rates.pairs
            if weight.format not in (None, COMPRESSED) and weight.format & BYTE_INPUT:
                rate = rates.bytes or rates.fp32
        reading = self.read(floors) if self.read is not None else read_bytes / rates.read
        return max(reading, self.operations / rate)


def quantize_w8a8(weight: Tensor) -> QuantizedMatrix:
    """Quantize to signed bytes with a scale for each output. Kernels round x, too."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    values = (weight.float() / scales).round().to(torch.int8)
    return QuantizedMatrix(values, scales, None, 8, weight.dtype, torch.float32, input_scale=0.0)


def quantize_q4_1(weight: Tensor) -> QuantizedMatrix:
    """Quantize to 4 bits with a scale and an offset, as in GGUF's Q4_1."""
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    low = blocks.amin(2)
    scales = (blocks.amax(2) - low) / 15
    values = ((blocks - low.unsqueeze(2)) / scales.unsqueeze(2)).round().clamp(0, 15).to(torch.int8)
    return QuantizedMatrix(values.flatten(1), scales.half(), low.half(), 4, weight.dtype)


QUANTIZE: dict[str, Callable[[Tensor], QuantizedMatrix]] = {
    "int8": quantize_int8,
    "w8a8": quantize_w8a8,
    "q4_1": quantize_q4_1,
    "mxfp4": quantize_mxfp4,
    "nvfp4": quantize_nvfp4,
    "nf4": quantize_nf4,
    "fp8": quantize_fp8,
    "mxfp8": quantize_mxfp8,
    **BLOCKS,
}


def linear_case(
    name: str, rows: int, size_in: int, size_out: int, dtype: torch.dtype, how: str, is_head: bool = False
) -> Case:
    weight_bytes = size_in * size_out * dtype.itemsize
    copies = max(1, COPIES_BYTES // weight_bytes)

    def pack(kernels: Kernels) -> PackedWeight:
        weight = torch.randn(size_out, size_in).to(dtype)
        quantizes = how in QUANTIZE and isinstance(kernels, NativeKernels)
        return kernels.pack(QUANTIZE[how](weight) if quantizes else weight)

    def make(kernels: Kernels) -> Callable[[], object]:
        packed = [pack(kernels) for _ in range(copies)]
        if is_head:  # logits are not part of a compiled pass
            x = torch.randn(rows, size_in).to(dtype)
            return lambda: [kernels.logits(x, weight) for weight in packed]
        return layers_pass(kernels, packed, torch.randn(rows, size_in).to(dtype))

    operations = 2.0 * rows * size_in * size_out
    return Case(f"{name} {size_in}->{size_out}", str(rows), make, weight_bytes, operations, copies, pack)


def layers_pass(kernels: Kernels, weights: list[PackedWeight], x: Tensor) -> Callable[[], object]:
    """Compile a pass that multiplies by one weight after the other, each as an operation of its own."""
    packed, ids = kernels.pack(x), torch.arange(len(x))
    nowhere = [LayerState((torch.empty(0),))]
    batch = AttentionBatch((0, len(x)), (len(x),), ())

    def forward(inputs: ForwardInputs) -> Tensor:
        rows = kernels.embed(inputs.token_ids, packed)
        # rows[:] makes a new tensor each time. Layers with the same input tensor would be joined into one operation.
        return [kernels.linear(rows[:], weight) for weight in weights][-1]

    compiled = kernels.compile(forward)
    return lambda: compiled(ForwardInputs(ids, ids, nowhere, batch))


def choose_case(name: str, shape: Shape, params: SamplingParams, rows: int) -> Case:
    """Make a case that chooses tokens from logits. A backend without kernels for this samples row by row."""
    logits = torch.randn(rows, shape.vocab) * 3
    draw = as_draw(params, 1, 0)
    assert draw is not None

    def make(kernels: Kernels) -> Callable[[], object]:
        chooser = kernels.chooser
        if chooser is None:
            return lambda: [sample(row.clone(), SamplingRow(params, [0], 0)) for row in logits]
        return lambda: chooser.choose(logits, range(rows), [draw] * rows)

    return Case(f"{name}, of {shape.vocab}", str(rows), make, logits.nbytes)


def in_shared_memory(values: Tensor) -> Tensor:
    """Copy values into shared memory like the arena's, because the page size decides how fast attention reads."""
    descriptor = os.memfd_create("pool")
    try:
        os.truncate(descriptor, values.nbytes)
        take_huge_pages(descriptor, values.nbytes)
        shared = torch.frombuffer(map_shared(descriptor, values.nbytes), dtype=values.dtype)
    finally:
        os.close(descriptor)
    return shared.copy_(values)


def attention_case(shape: Shape, count: int, context: int, requests: int, dtype: torch.dtype) -> Case:
    """Make an attention case.

    Decoding (`count` is 1) goes through more layers than fit in a CPU cache. A prompt uses one layer, because in a real
    step its KV has just been written.
    """
    blocks = -(-context // BLOCK_TOKENS)
    elements = 2 * shape.kv_heads * BLOCK_TOKENS * shape.head_dim
    layer_bytes = requests * blocks * elements * dtype.itemsize
    layers = max(1, COPIES_BYTES // layer_bytes) if count == 1 else 1
    pool = in_shared_memory(torch.randn(requests * blocks * elements).to(dtype).repeat(layers))
    caches = itertools.cycle(view_pool(pool, layers * elements, layers, shape.kv_heads, BLOCK_TOKENS, shape.head_dim))
    tables = torch.randperm(requests * blocks).view(requests, blocks).int()
    nothing = torch.zeros(0, dtype=torch.int64)
    group = GroupTables(BLOCK_TOKENS, 0, tables, nothing, nothing)
    batch = AttentionBatch(tuple(range(0, requests * count + 1, count)), (context,) * requests, (group,))
    queries = torch.randn(requests * count, shape.heads, shape.head_dim).to(dtype)

    def make(kernels: Kernels) -> Callable[[], object]:
        return lambda: kernels.attention(queries, next(caches), batch, group, 0.1, 0.0)

    def read(floors: Floors) -> float:
        slots = torch.arange(layers) * elements + tables.flatten().unsqueeze(1) * layers * elements  # [slots, layers]
        addresses = pool.data_ptr() + slots.T.flatten() * dtype.itemsize
        return floors.read_blocks(addresses, elements * dtype.itemsize, READ_ROUNDS) / layers

    pairs = requests * count * (context - (count - 1) / 2)
    return Case(
        f"attention, context {context}",
        f"{requests}x{count}",
        make,
        layer_bytes,
        4.0 * pairs * shape.heads * shape.head_dim,
        read=read if count == 1 else None,
    )


def row_cases(shape: Shape, rows: int, dtype: torch.dtype) -> Iterator[Case]:
    def randn(*size: int) -> Tensor:
        return torch.randn(size).to(dtype)

    x, weight = randn(rows, shape.hidden), randn(shape.hidden)
    yield Case("rms_norm", str(rows), lambda k: lambda: k.rms_norm(x, weight, 1e-5), x.nbytes)
    heads, positions = randn(rows, shape.heads, shape.head_dim), torch.arange(rows)
    cos, sin = ReferenceKernels().rotation(positions, torch.rand(shape.head_dim // 2))
    yield Case("rotate", str(rows), lambda k: lambda: k.rotate(heads, cos, sin), heads.nbytes)
    gate, up = randn(rows, shape.inner), randn(rows, shape.inner)
    yield Case("silu_and_mul", str(rows), lambda k: lambda: k.silu_and_mul(gate, up), 2 * gate.nbytes)
    yield Case("gelu_tanh_and_mul", str(rows), lambda k: lambda: k.gelu_tanh_and_mul(gate, up), 2 * gate.nbytes)
    elements = 2 * shape.kv_heads * BLOCK_TOKENS * shape.head_dim
    cache = view_pool(randn(rows * elements), elements, 1, shape.kv_heads, BLOCK_TOKENS, shape.head_dim)[0]
    keys = randn(rows, shape.kv_heads, shape.head_dim)
    group = GroupTables(BLOCK_TOKENS, 0, torch.zeros(1, 1, dtype=torch.int32), positions, positions % BLOCK_TOKENS)
    yield Case("store_kv", str(rows), lambda k: lambda: k.store_kv(keys, keys, cache, group), 2 * keys.nbytes)


def cases(shape: Shape, dtype: torch.dtype, how: str) -> Iterator[Case]:
    width = shape.heads * shape.head_dim
    unit = K_BLOCK if how.endswith("_k") else 1
    for rows in (1, 8, 64, 512):
        if shape.hidden % unit == 0:
            yield linear_case("linear q", rows, shape.hidden, width, dtype, how)
            yield linear_case("linear up", rows, shape.hidden, shape.inner, dtype, how)
        if shape.inner % unit == 0:
            yield linear_case("linear down", rows, shape.inner, shape.hidden, dtype, how)
    for rows in (1, 8):
        if shape.hidden % unit == 0:
            yield linear_case("linear head", rows, shape.hidden, shape.vocab, dtype, how, is_head=True)
        yield choose_case("draw", shape, SamplingParams(temperature=1.0, seed=1), rows)
        yield choose_case("draw, top_p 0.95", shape, SamplingParams(temperature=1.0, top_p=0.95, seed=1), rows)
        yield choose_case("draw, top_k 50", shape, SamplingParams(temperature=1.0, top_k=50, seed=1), rows)
    for requests, count, context in ((1, 1, 1024), (8, 1, 1024), (1, 512, 512), (1, 512, 2048)):
        yield attention_case(shape, count, context, requests, dtype)
    for rows in (1, 512):
        yield from row_cases(shape, rows, dtype)


def recurrent_cases(mamba: Mamba, requests: int, count: int, dtype: torch.dtype) -> Iterator[Case]:
    """Make cases for a step in which contexts continue within a block, with more layers than fit in a CPU cache."""
    scanned = ((mamba.heads, mamba.head_dim, mamba.state_size), (1, mamba.conv_channels + mamba.heads))
    parts = (*scanned, (mamba.conv_taps - 1, mamba.conv_channels))
    slot_bytes = 4 * sum(map(math.prod, parts))
    layers = max(1, COPIES_BYTES // (requests * slot_bytes))
    states = itertools.cycle(
        view_states(torch.zeros(requests * layers * slot_bytes // 4), layers * slot_bytes, layers, parts)
    )
    nothing = torch.zeros(0, dtype=torch.int64)
    group = GroupTables(1024, 2, torch.arange(requests, dtype=torch.int32).unsqueeze(1), nothing, nothing)
    begin = 7
    batch = AttentionBatch(tuple(range(0, requests * count + 1, count)), (begin + count,) * requests, (group,))
    tokens = requests * count
    x, weight = torch.randn(tokens, mamba.conv_channels).to(dtype), torch.randn(mamba.conv_taps, mamba.conv_channels)
    weight, time_steps = weight.to(dtype), torch.randn(tokens, mamba.heads).to(dtype)
    rates = torch.stack((-torch.rand(mamba.heads), torch.zeros(mamba.heads), torch.ones(mamba.heads)))

    def conv(kernels: Kernels) -> Callable[[], object]:
        return lambda: kernels.causal_conv(x, weight, None, next(states).parts[2], batch, group)

    def scan(kernels: Kernels) -> Callable[[], object]:
        def run() -> object:
            state = RecurrentState(*next(states).parts[:2])
            state.pending[:, 0, 0] = begin  # as if the state had not been advanced by this step before
            return kernels.selective_scan(x, time_steps, rates, state, batch, group)

        return run

    rows, state_bytes = f"{requests}x{count}", 4 * requests * math.prod(parts[0])
    yield Case("causal_conv", rows, conv, 4 * requests * mamba.conv_taps * mamba.conv_channels + x.nbytes)
    yield Case("selective_scan", rows, scan, state_bytes + x.nbytes, 6.0 * tokens * math.prod(parts[0]))


def all_cases(dtype: torch.dtype, how: str) -> Iterator[tuple[str, Case]]:
    """Yield all cases, each with the model's name."""
    for shape in MODELS:
        yield from ((shape.name, case) for case in cases(shape, dtype, how))
    name, mamba = HYBRID
    for requests, count in ((1, 1), (8, 1), (1, 512)):
        yield from ((name, case) for case in recurrent_cases(mamba, requests, count, dtype))


def medians(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """Return the median seconds of each run. Runs take turns, and one that does not count precedes each timed one."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, run_times in zip(runs, times):
            time.sleep(SPINNING_SECONDS)
            run()
            began = clock()
            run()
            run_times.append(clock() - began)
    return [statistics.median(run_times) for run_times in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads [%(default)s]")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of the measurement [%(default)s]")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="type of weights and activations [%(default)s]",
    )
    parser.add_argument(
        "--quantization", choices=("none", *QUANTIZE), default="none", help="format of the model's matrices"
    )
    parser.add_argument("--instruction-set", default="auto", help="instruction set of the kernels [%(default)s]")
    parser.add_argument("--only", default="", help="run only kernels whose name contains this")
    parser.add_argument("--model", default="", help="run only shapes of models whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    native = NativeKernels(options.threads, options.instruction_set)
    backends: list[Kernels] = [native, ReferenceKernels()]
    with torch.inference_mode():
        floors = Floors(native.instruction_set, options.threads)
        rates = floors.rates(options.rounds)
        print(f"{native.instruction_set}, {options.threads} threads, {options.dtype}")
        print(
            f"reads {rates.read / 1e9:.1f} GB/s; computes {rates.fp32 / 1e9:.0f} GFLOP/s in fp32, "
            f"{rates.bf16 / 1e9:.0f} in bf16, {rates.pairs / 1e9:.0f} in 16-bit integers, "
            f"{rates.bytes / 1e9:.0f} in bytes (0: no such instructions)"
        )
        print(f"{'model':<17}{'kernel':<28}{'rows':>7}{'native us':>11}{'torch us':>11}{'speedup':>9}{'of floor':>10}")
        for name, case in all_cases(dtype, options.quantization):
            if options.only not in case.name or options.model not in name:
                continue
            runs = [case.make(kernels) for kernels in backends]
            our_time, torch_time = (seconds / case.calls for seconds in medians(options.rounds, *runs))
            floor = case.floor(native, floors, rates, dtype)
            print(
                f"{name:<17}{case.name:<28}{case.rows:>7}{our_time * 1e6:>11.1f}{torch_time * 1e6:>11.1f}"
                f"{torch_time / our_time:>9.2f}{floor / our_time:>10.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
