"""What a worker loads later than its model is of the files that it has started with."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from paceline.core.errors import ModelError
from paceline.core.types import Constraint, ConstraintKind
from paceline.engine.loading import Loaded, load
from paceline.kernels.reference import ReferenceKernels
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.services.gateway.toy_model import write_toy_model
from tests.tiny_checkpoints import write_qwen3_vl, write_tiny


def load_folder(folder: Path) -> Loaded:
    return load(folder, torch.float32, torch.device("cpu"), ReferenceKernels(), None)


def test_encoders_of_a_model_that_was_replaced_meanwhile_are_refused(tmp_path: Path) -> None:
    write_qwen3_vl(tmp_path)
    loaded = load_folder(tmp_path)
    assert loaded.load_encoders is not None
    loaded.load_encoders()
    file = tmp_path / "model.safetensors"
    before = file.stat()
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    other = tmp_path / "other"
    other.write_bytes(changed)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    with pytest.raises(ModelError, match=r"model\.safetensors has changed since it was read; start again"):
        loaded.load_encoders()


def test_the_tokenizer_of_constraints_is_built_with_the_model(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    toy = write_toy_model(tmp_path / "toy")
    shutil.copy(toy / "tokenizer.json", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5]}')
    grammars = load_folder(tmp_path).grammars
    assert grammars.built == 1
    ends = Tokenizer(tmp_path).eos_token_ids
    grammars.compile(Constraint(ConstraintKind.REGEX, "a", ends))
    assert grammars.built == 1
    grammars.compile(Constraint(ConstraintKind.REGEX, "a", ends | {1}))
    assert grammars.built == 2


def test_the_fingerprint_covers_every_byte_and_names_its_parts(tmp_path: Path) -> None:
    write_tiny(tmp_path, "llama")
    one = load_folder(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    other = load_folder(tmp_path)
    assert one.layout.fingerprint != other.layout.fingerprint
    assert one.weights != other.weights
    differing = set(one.layout.parts) ^ set(other.layout.parts)
    assert {name for name, _ in differing} == {"model.safetensors"}
