"""Time of each Triton kernel, compared with plain torch and with a floor, at the shapes of real models.

    python -m bench.gpu.kernels --out kernels.json [--rounds 30]

The floor is the larger of two times: bytes to move divided by the read bandwidth, and operations divided by the best
rate of a matrix product. Both rates are measured first. "torch" is the reference, which runs the operations of a fused
kernel one by one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.compute.kernels import BLOCK_TOKENS, Case, Shape, attention_case, linear_case, row_cases
from bench.compute.loop import machine
from bench.gpu.timing import matrix_peak, median_seconds, options_of, pick_device, read_bandwidth, recorded
from paceline.kernels import select_kernels
from paceline.kernels.batch import GroupTables
from paceline.kernels.caches import view_pool
from paceline.kernels.choosing import Draw
from paceline.kernels.interface import HeadNorms, Kernels
from paceline.kernels.reference import ReferenceKernels

MODELS = (
    Shape("llama-8b", 4096, 14336, 32, 8, 128, 128_256),
    Shape("gemma-3-27b", 5376, 21504, 32, 16, 128, 262_208),
)
SMALL = (Shape("tiny", 60, 100, 6, 2, 20, 500),)
ATTENTION = ((1, 1, 4096), (64, 1, 4096), (64, 5, 4096), (1, 4096, 4096))
SMALL_ATTENTION = ((1, 1, 40), (3, 2, 30))
"""Number of requests, new tokens of each, tokens of each context."""
_CALLS = 10
_NOT_RECORDED = ("linear", "choose")
"""Linear layers with few rows run as a CUDA graph of their own. The choice of tokens copies options from the host."""


def fused_cases(shape: Shape, rows: int, dtype: torch.dtype) -> Iterator[Case]:
    """Make cases for fused kernels. Their bytes are the bytes to read, and as many bytes to write."""

    def randn(*size: int) -> Tensor:
        return torch.randn(size).to(dtype)

    x, y, weight = randn(rows, shape.hidden), randn(rows, shape.hidden), randn(shape.hidden)
    yield Case("add_rms_norm", str(rows), lambda k: lambda: k.add_rms_norm(x, y, weight, 1e-5), 4 * x.nbytes)
    heads, keys = randn(rows, shape.heads, shape.head_dim), randn(rows, shape.kv_heads, shape.head_dim)
    positions = torch.arange(rows)
    cos, sin = ReferenceKernels().rotation(positions, torch.rand(shape.head_dim // 2))
    elements = 2 * shape.kv_heads * BLOCK_TOKENS * shape.head_dim
    cache = view_pool(randn(rows * elements), elements, 1, shape.kv_heads, BLOCK_TOKENS, shape.head_dim)[0]
    group = GroupTables(BLOCK_TOKENS, 0, torch.zeros(1, 1, dtype=torch.int32), positions, positions % BLOCK_TOKENS)
    size = randn(shape.head_dim)
    for name, norms in (("rotate_and_store", None), ("norms, rotate_and_store", HeadNorms(size, size, 1e-6, True))):

        def make(kernels: Kernels, norms: HeadNorms | None = norms) -> Callable[[], object]:
            return lambda: kernels.rotate_and_store(heads, keys, keys, cos, sin, cache, group, norms)

        yield Case(name, str(rows), make, 2 * (heads.nbytes + 2 * keys.nbytes))


def sampling_cases(shape: Shape, rows: int) -> Iterator[Case]:
    logits = torch.randn(rows, shape.vocab)
    draws = {
        "greedy": Draw(0.0, 0, 0.0, 1.0, 1, 1),
        "temperature": Draw(0.8, 0, 0.0, 1.0, 1, 1),
        "top_k, top_p": Draw(0.8, 50, 0.0, 0.9, 1, 1),
    }
    for name, draw in draws.items():

        def make(kernels: Kernels, draw: Draw = draw) -> Callable[[], object]:
            chooser = kernels.chooser
            if chooser is not None:
                return lambda: chooser.choose(logits, range(rows), [draw] * rows)
            if draw.temperature == 0:
                return lambda: logits.argmax(1)
            return lambda: torch.multinomial(torch.softmax(logits / draw.temperature, 1), 1)

        yield Case(f"choose, {name}", str(rows), make, logits.nbytes)


def cases(shape: Shape, dtype: torch.dtype, small: bool) -> Iterator[Case]:
    width = shape.heads * shape.head_dim
    for rows in (1, 3) if small else (1, 64, 4096):
        yield linear_case("linear q", rows, shape.hidden, width, dtype, "none")
        yield linear_case("linear down", rows, shape.inner, shape.hidden, dtype, "none")
        yield from row_cases(shape, rows, dtype)
        yield from fused_cases(shape, rows, dtype)
    for requests, count, context in SMALL_ATTENTION if small else ATTENTION:
        yield attention_case(shape, count, context, requests, dtype)
    for rows in (1, 3) if small else (1, 64):
        yield from sampling_cases(shape, rows)


def seconds_of(case: Case, kernels: Kernels, device: torch.device, rounds: int) -> float:
    """Return the median seconds of a call.

    On a GPU, our small operations run in a CUDA graph of several calls, as in a decode step, because their launches
    from Python would take longer. The reference is launched one by one: parts of it wait for the device.
    """
    run, calls = case.make(kernels), case.calls
    if kernels.name.startswith("triton") and not case.name.startswith(_NOT_RECORDED):
        calls, once = _CALLS, run

        def several() -> list[Tensor]:
            for _ in range(calls):
                once()
            return []

        run = recorded(several, device)
    return median_seconds(run, device, rounds) / calls


def main() -> None:
    parser = options_of(__doc__, "tiny shapes", 30)
    parser.add_argument("--only", default="", help="run only kernels whose name contains this")
    options = parser.parse_args()
    device = pick_device(options.small)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backends: list[Kernels] = [select_kernels(device, options.kernels), ReferenceKernels()]
    results = []
    with torch.inference_mode(), torch.device(device):
        bandwidth, peak = read_bandwidth(device, options.small), matrix_peak(device, dtype, options.small)
        print(f"reads {bandwidth / 1e9:.0f} GB/s, computes {peak / 1e12:.2f} TFLOP/s; {backends[0].name} beside torch")
        for shape, case in itertools.chain.from_iterable(
            ((shape, case) for case in cases(shape, dtype, options.small))
            for shape in (SMALL if options.small else MODELS)
        ):
            if options.only not in case.name:
                continue
            ours, plain = (seconds_of(case, kernels, device, options.rounds) for kernels in backends)
            floor = max(case.read_bytes / bandwidth, case.operations / peak)
            results.append(
                {
                    "model": shape.name,
                    "kernel": case.name,
                    "rows": case.rows,
                    "seconds": ours,
                    "torch_seconds": plain,
                    "share_of_floor": floor / ours,
                }
            )
            print(
                f"{shape.name:<14}{case.name:<32}{case.rows:>8}{ours * 1e6:>11.1f} us{plain * 1e6:>11.1f} us of torch, "
                f"{floor / ours:>6.1%} of the floor",
                flush=True,
            )
    options.out.write_text(json.dumps({"machine": machine(device), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
