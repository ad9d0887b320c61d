"""The identity of a model that pools: the digest of everything that its results depend on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from paceline.core.pooling_folder import BGE_M3_FILES, POOLING_FILES
from paceline.core.pooling_modules import MODULES_FILE
from paceline.models.identity import model_identity


def weights_digest(folder: Path, dtype: torch.dtype) -> str:
    """Return the digest of a model's weights and of all files that say what follows after the hidden states."""
    digest = hashlib.sha256(model_identity(folder, str(dtype).removeprefix("torch.")).weights.encode())
    for path in _files(folder):
        digest.update(f"{path.relative_to(folder)}:".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Return the files, beside config.json and the weights, on which results depend."""
    path = folder / MODULES_FILE
    modules = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    places = {str(each.get("path", "")) for each in modules} - {""}
    of_modules = [folder / place / name for place in places for name in ("config.json", "model.safetensors")]
    own = [folder / name for name in (*POOLING_FILES, *BGE_M3_FILES)]
    return sorted(each for each in (*of_modules, *own) if each.is_file())
