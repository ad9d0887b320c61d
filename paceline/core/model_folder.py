"""Which model a folder holds, as far as everybody who looks into it can tell."""

from __future__ import annotations

import hashlib
from pathlib import Path

_FILES = ("config.json", "tokenizer.json")


def model_digest(folder: Path) -> str:
    """A digest of a model folder's config and tokenizer; weights need not be there.

    A gateway and workers that agree in it mean the same by a token id and by a context's length.
    """
    digest = hashlib.sha256()
    for name in _FILES:
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name}:{len(content)}:".encode() + content)
    return digest.hexdigest()
