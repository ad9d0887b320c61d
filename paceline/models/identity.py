"""The identity of a model, which must be equal before two workers may share cached blocks."""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from paceline.core.config import ChosenQuantization, ModelImpl
from paceline.core.model_folder import PROCESSOR_FILES, QUANTIZATION_FILES
from paceline.core.online_quantization import as_online
from paceline.core.pooling_files import pooling_files
from paceline.models.config import implementation
from paceline.models.files.content import FileContent, read_content
from paceline.models.files.gguf_reference import REFERENCE_FILE, gguf_files, has_reference, read_reference
from paceline.models.folder import weight_files

_ADAPTED = ("generation_config.json", "adapter_config.json")
"""Files that `transformers` reads besides config.json when it loads a model."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A model, and everything else that affects the KV blocks that are computed with it."""

    content: FileContent
    """The files from which the model is loaded, with digests. Links in the folder lead to the parts of a GGUF file."""
    dtype: str
    quantization: str
    """Name of the `OnlineQuantization`, such as "int8", or "none". "gguf" counts as "none": both have the same weights,
    so their workers may exchange blocks. Their results have the same bits, unless products with GGUF's blocks are in
    integers. Then they differ as much as results of two instruction sets.
    """
    code: str
    """Name of the code that computes the model, from `implementation_name`. Blocks of different codes differ in their
    last bits.
    """
    adapters: str = ""
    """What workers leave out of adapters or round in them, from `AdapterChoice.deviation`. The digest of an adapter in
    the names of blocks covers its files alone.
    """

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """Names and values of everything that this identity consists of."""
        properties = [("dtype", self.dtype), ("quantization", self.quantization), ("implementation", self.code)]
        if self.adapters:
            properties.append(("adapters", self.adapters))
        return (*properties, *((file.name, file.digest) for file in self.content.files))

    @property
    def weights(self) -> str:
        """Digest of the weights and of the files that describe them alone. Workers with equal digests have the same
        model, so one can continue another's text.
        """
        digests = [(file.name, file.digest) for file in self.content.files if _is_weight(file.name)]
        return hashlib.sha256(repr(digests).encode()).hexdigest()

    @property
    def digest(self) -> str:
        """Digest of all parts, in hexadecimal digits."""
        return hashlib.sha256(repr(self.parts).encode()).hexdigest()


def model_identity(
    folder: Path, dtype: str, quantization: ChosenQuantization = "auto", code: str = "native", adapters: str = ""
) -> ModelIdentity:
    """Return the identity of the model in a folder, which covers every byte of every file that a worker computes with.

    Raises ModelError if a file cannot be read or changes while it is read, or if a GGUF file is not the one that was
    converted.
    """
    content = read_content({path.relative_to(folder).as_posix(): path for path in _files(folder, code)})
    if has_reference(folder):
        read_reference(folder).check(folder, content)
    return ModelIdentity(content, dtype, str(as_online(quantization) or "none"), code, adapters)


def _is_weight(name: str) -> bool:
    """Return whether a file is the config or holds weights, whatever code computes the model."""
    return name in ("config.json", REFERENCE_FILE, *QUANTIZATION_FILES) or name.endswith((".safetensors", ".gguf"))


def _files(folder: Path, code: str) -> list[Path]:
    """Return the files that a worker computes with: config, weights, how media are scaled, how hidden states are
    pooled, and code of the folder.
    """
    adapted = _ADAPTED if code != "native" else ()
    small = ["config.json", *QUANTIZATION_FILES, *PROCESSOR_FILES, REFERENCE_FILE, *adapted, *pooling_files(folder)]
    found = [path for name in small if (path := folder / name).is_file()]
    code_files = sorted(folder.rglob("*.py")) if code != "native" else []
    return [*found, *weight_files(folder), *gguf_files(folder), *code_files]


def implementation_name(folder: Path, model_impl: ModelImpl) -> str:
    """Return the name of the code that computes a model, as in `Numerics.implementation`.

    Raises:
        ModelError: config.json cannot be read.
    """
    if implementation(folder, model_impl) == "native":
        return "native"
    # Another version may compute the same model with other operations. If it is not installed, loading says so.
    version = next((distribution.version for distribution in importlib.metadata.distributions(name="transformers")), "")
    return f"transformers {version}".strip()
