"""Models with experts on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.kernels import select_kernels
from paceline.models.loader import load_model

pytest.importorskip("triton", reason="the package triton is not installed")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FIRST, SECOND = [5, 17, 29, 3, 41], [8, 9, 60]


@pytest.mark.slow
# Rows that pad a step have arbitrary content, about which numpy warns in Triton's interpreter.
@pytest.mark.filterwarnings("ignore:overflow ", "ignore:invalid value ", "ignore:divide by zero ")
@pytest.mark.parametrize("kernels", ["triton", "triton-invariant"])
def test_padded_steps_give_the_logits_of_transformers(
    tmp_path: Path, save_qwen3_moe: Any, paged_contexts: Any, kernels: str
) -> None:
    reference = save_qwen3_moe(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1).to(DEVICE)
    model = load_model(tmp_path, torch.float32, select_kernels(DEVICE, kernels), DEVICE)
    with DEVICE:
        contexts = paged_contexts(model, 2, 20)
        steps = [contexts.step({0: FIRST[:3], 1: SECOND[:1]}), contexts.step({0: FIRST[3:], 1: SECOND[1:]})]
        for request, tokens in enumerate((FIRST, SECOND)):
            with torch.inference_mode():
                wanted = reference(torch.tensor([tokens]), use_cache=False).logits[0]
            torch.testing.assert_close(torch.cat([step[request] for step in steps]), wanted, atol=1e-4, rtol=1e-4)
