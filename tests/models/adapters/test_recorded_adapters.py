"""Adapters that PEFT has written give the logits that PEFT computes with them; see `record_peft.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.kernels.reference import ReferenceKernels
from tests.models.adapters.record_peft import CASES, FOLDER, PROMPT, write_base
from tests.models.adapters.test_adapted_models import load_adapted, place


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_peft(name: str, backend: str, tmp_path: Path, paged_contexts: Any) -> None:
    family, changes, _ = CASES[name]
    plain = write_base(tmp_path, family, changes)
    model = load_adapted(tmp_path, ReferenceKernels() if backend == "reference" else None)
    kept = place(model, FOLDER / name)
    contexts = paged_contexts(model, 2, 64)
    contexts.adapters = {0: 0}
    found = contexts.step({0: PROMPT, 1: PROMPT})
    wanted = load_file(FOLDER / name / "logits.safetensors")["logits"]
    with torch.inference_mode():
        alone = plain(torch.tensor([PROMPT])).logits[0]
    assert (wanted - alone).abs().max() > 0.1
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], alone, rtol=1e-4, atol=1e-4)
    del kept
