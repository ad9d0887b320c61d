"""The reference of a converted folder to the GGUF file from which it was converted. Imports no torch.

The matrices of the model stay where they are: the folder has links to the parts of the GGUF file, and REFERENCE_FILE
says at which byte each matrix begins. It also has the digest of each part, so that another file behind a link is an
error and not another model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError, ModelError
from paceline.models.files.content import FileContent

REFERENCE_FILE = "gguf.json"


@dataclass(frozen=True, slots=True)
class PlacedMatrix:
    """A matrix of the model and its place in a GGUF file."""

    type_name: str
    """GGUF's type."""
    shape: tuple[int, ...]
    """[out, in], or [experts, out, in]."""
    places: tuple[tuple[int, int], ...]
    """Number of the file and first byte: one place, or the places of two halves, which follow each other in each
    expert's matrix.
    """
    part_bytes: int
    """Number of bytes at each of the places."""
    heads: int = 0
    """Number of heads in which the file interleaves the halves of the rotary embedding; 0 if the order of rows is that
    of the model.
    """


@dataclass(frozen=True, slots=True)
class GgufReference:
    """The matrices of a folder that are in a GGUF file."""

    digests: Mapping[str, str]
    """Digest of the content of each part of the file, by the name of the folder's link to it, in the order of parts."""
    matrices: Mapping[str, PlacedMatrix]
    unpacked: Mapping[str, str]
    """GGUF's types of quantized matrices that are in the folder's safetensors, because no kernels read their blocks."""

    def write(self, folder: Path) -> None:
        """Write REFERENCE_FILE. Raises OSError."""
        matrices = {
            name: (own.type_name, own.shape, own.places, own.part_bytes, own.heads)
            for name, own in self.matrices.items()
        }
        content = {"digests": dict(self.digests), "matrices": matrices, "unpacked": dict(self.unpacked)}
        (folder / REFERENCE_FILE).write_text(json.dumps(content))

    def check_packed(self) -> None:
        """Raise ConfigError if some quantized matrices cannot stay packed."""
        for name, type_name in self.unpacked.items():
            raise ConfigError(
                f"--quantization gguf: {name} has GGUF's type {type_name}, whose blocks cannot stay packed; choose "
                "--quantization int8 or none"
            )

    def check(self, folder: Path, content: FileContent) -> None:
        """Raise ModelError if a part of the GGUF file is not the one that was converted.

        Args:
            content: the files of the folder, as they were read.
        """
        for file in content.files:
            if self.digests.get(file.name, file.digest) == file.digest:
                continue
            if not (folder / file.name).is_symlink():
                raise ModelError(f"{file.path} is damaged; remove {folder}, and the next start makes it again")
            raise ModelError(
                f"{file.path} is not the GGUF file from which {folder} was converted; give serve or prepare the GGUF "
                "file itself, which converts the new one"
            )


def has_reference(folder: Path) -> bool:
    """Return whether the matrices of a folder are in a GGUF file."""
    return (folder / REFERENCE_FILE).is_file()


def read_reference(folder: Path) -> GgufReference:
    """Return a folder's reference. Raises ModelError if it cannot be read."""
    try:
        found = json.loads((folder / REFERENCE_FILE).read_text(encoding="utf-8"))
        matrices = {
            name: PlacedMatrix(kind, tuple(shape), tuple((file, start) for file, start in places), size, heads)
            for name, (kind, shape, places, size, heads) in found["matrices"].items()
        }
        return GgufReference(dict(found["digests"]), matrices, dict(found["unpacked"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{folder / REFERENCE_FILE} cannot be read ({error}); remove {folder}, and the next start converts the "
            "GGUF file again"
        ) from error


def gguf_files(folder: Path) -> list[Path]:
    """Return a folder's links to the parts of its GGUF file; empty if it was not converted from one.

    Raises:
        ModelError: a part is missing, or the reference cannot be read.
    """
    if not has_reference(folder):
        return []
    files = [folder / name for name in read_reference(folder).digests]
    for file in files:
        if not os.path.isfile(file):  # unlike Path.is_file, it also returns False if a folder may not be searched
            gone = file.resolve() if file.is_symlink() else file
            raise ModelError(
                f"{gone} is missing, and {folder} has no copy of its weights; put the GGUF file back, or give serve or "
                "prepare its new path"
            )
    return files
