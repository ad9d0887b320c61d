"""The small files in a model's folder, and the model's identity, which gateways and workers compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelError
from paceline.core.pooling_files import settings_files

_FILES = ("config.json", "tokenizer.json")
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files that say how images, videos and audio are prepared."""
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that describe quantized weights if config.json does not."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The config and the tokenizer of a model, and what it says of pooling, as digests.

    If a gateway and a worker have the same digests, they agree on token ids, on the longest context, and on prompts.
    """

    digest: str
    """Digest of all these files."""
    digests: Mapping[str, str]
    """Digest of each file by its name, so that a difference can be named."""

    def difference(self, others: Mapping[str, str]) -> str:
        """Return the names of the files whose digests differ from those of another member. Digests that the other
        member does not report are not compared.
        """
        differing = [name for name, digest in self.digests.items() if others.get(name, digest) != digest]
        return " and ".join(differing) or " or ".join(self.digests)


def read_model_files(folder: Path) -> ModelFiles:
    """Return the digests of the files in a model's folder. The folder need not contain weights."""
    digest, digests = hashlib.sha256(), {}
    for name in (*_FILES, *settings_files(folder)):
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{name}:{len(content)}:".encode() + content)
        digests[name] = hashlib.sha256(content).hexdigest()[:16]
    return ModelFiles(digest.hexdigest(), digests)


def model_digest(folder: Path) -> str:
    """Return `ModelFiles.digest` of a model's folder: the digest of its small files."""
    return read_model_files(folder).digest


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is no such file. Raises ModelError if it cannot be read."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return values
