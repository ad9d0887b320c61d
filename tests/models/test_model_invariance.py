"""In bf16 too, the bits of a token's logits do not depend on the chunks of its prompt or on other requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels.interface import Forward
from paceline.kernels.native import NativeKernels
from paceline.kernels.native.library import instruction_sets
from paceline.models.loader import load_model
from tests.tiny_checkpoints import write_gemma3_with_vision, write_gemma4_with_media, write_tiny

CPU = torch.device("cpu")
PROMPT = [(7 * index * index + 3) % 97 for index in range(150)]
NEIGHBOUR = [(5 * index + 11) % 97 for index in range(40)]


class CalledOneByOne(NativeKernels):
    def compile(self, forward: Forward) -> Forward:
        return forward


BEST, *OTHERS = instruction_sets()
FAMILIES = ["llama", "gemma3", "granite_hybrid", "ministral3", "gpt_oss", "deepseek_v3", "gemma4", "qwen3_5"]
CASES = [*((family, BEST) for family in FAMILIES), *(("gpt_oss", own) for own in OTHERS)]
"""Families with the best instruction set, and one with windows, sinks and experts with the others. Kernels with all
instruction sets have tests of their own."""


def logits_in(
    contexts: Any, *parts: list[int], beside: list[int] | None = None, image: tuple[int, Tensor] | None = None
) -> Tensor:
    """Return the logits of request 0, whose tokens come in `parts`. If `beside` is given, request 1 has one of these
    tokens in every step."""
    results = []
    for index, part in enumerate(parts):
        tokens = {0: part}
        if beside is not None:
            tokens = {1: beside[index : index + 1], 0: part}
        results.append(contexts.step(tokens, image=image)[0])
    return torch.cat(results)


def cut(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "instruction_set"), CASES)
def test_logits_do_not_depend_on_chunks_batches_or_threads(
    family: str, instruction_set: str, tmp_path: Path, paged_contexts: Any
) -> None:
    write_tiny(tmp_path, family, torch.bfloat16)
    results = []
    for kernels in (NativeKernels(2, instruction_set), CalledOneByOne(1, instruction_set)):
        model = load_model(tmp_path, torch.bfloat16, kernels, CPU)
        ways = (([PROMPT], None), ([PROMPT[:110], *cut(PROMPT[110:], 1)], None), (cut(PROMPT, 33), NEIGHBOUR))
        for parts, beside in ways:
            contexts = paged_contexts(model, 2, 256, torch.bfloat16)
            results.append(logits_in(contexts, *parts, beside=beside))
    assert results[0].isfinite().all()
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("family", ["gemma3", "experts", "edge"])
def test_logits_behind_an_image_do_not_depend_on_chunks_batches_or_threads(
    family: str, instruction_set: str, tmp_path: Path, paged_contexts: Any
) -> None:
    if family == "gemma3":
        write_gemma3_with_vision(tmp_path)
    else:
        write_gemma4_with_media(tmp_path, family, use_bidirectional_attention="vision" if family == "experts" else None)
    image = 40, torch.randn(60, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    before, inside, after = PROMPT[:40], PROMPT[40:100], PROMPT[100:]
    results = []
    for kernels in (NativeKernels(2, instruction_set), CalledOneByOne(1, instruction_set)):
        model = load_model(tmp_path, torch.bfloat16, kernels, CPU)
        for parts in ([PROMPT], [before, inside, *cut(after, 1)], [*cut(before, 33), inside + after[:20], after[20:]]):
            contexts = paged_contexts(model, 2, 256, torch.bfloat16)
            results.append(logits_in(contexts, *parts, beside=NEIGHBOUR * 2, image=image))
    assert results[0].isfinite().all()
    for result in results[1:]:
        assert torch.equal(result, results[0])
    plain = logits_in(paged_contexts(model, 1, 256, torch.bfloat16), PROMPT)
    assert not torch.equal(plain[40:], results[0][40:])
    assert torch.equal(plain[:40], results[0][:40])
