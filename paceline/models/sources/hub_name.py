"""Names of models on the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(/(?P<gguf>.+\.gguf))?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub, or one of its GGUF files."""

    repository: str
    """Owner and name: `org/name`."""
    gguf: str = ""
    """Path of a GGUF file inside the repository; "" if the model is the repository's safetensors."""

    def __str__(self) -> str:
        return f"{self.repository}/{self.gguf}" if self.gguf else self.repository


def parse_hub_name(model: str) -> HubName | None:
    """Return the hub's model that `model` names: `org/name` or `org/name/file.gguf`.

    Returns None if `model` has another form, or if it is a file or folder of this machine, which takes precedence.
    `folder/file.gguf` is always a path.
    """
    match = _NAME.fullmatch(model)
    if match is None or match["repository"].lower().endswith(".gguf") or ".." in model or Path(model).exists():
        return None
    return HubName(match["repository"], match["gguf"] or "")
