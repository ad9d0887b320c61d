"""The identity of the model in a folder, which gateways and workers compare."""

from __future__ import annotations

import hashlib
from pathlib import Path

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
