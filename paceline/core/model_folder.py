"""The small files in a model's folder, and the model's identity, which gateways and workers compare."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelError

_FILES = ("config.json", "tokenizer.json")


def model_digest(folder: Path) -> str:
    """Return a digest of the config and the tokenizer in a model's folder. The folder need not contain weights.

    If a gateway and a worker have the same digest, token ids and the longest context mean the same to both.
    """
    digest = hashlib.sha256()
    for name in _FILES:
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is no such file. Raises ModelError if it cannot be read."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return values
