"""The files of a Hugging Face model folder. Imports no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

from paceline.core.errors import ModelError
from paceline.models.files.gguf_reference import has_reference, read_reference
from paceline.models.formats import WeightFormat

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LENGTH_BYTES = 8
"""Number of bytes at the beginning of a safetensors file that contain the length of its header."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")


def check_folder(folder: Path) -> Path:
    """Check that a folder has all files that serving needs, and return it.

    Raises:
        ModelError: names the missing files.
    """
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder} lacks {' and '.join(missing)}; give a Hugging Face model folder")
    weight_files(folder)
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: its only file, or all files that its index names.

    Raises:
        ModelError: there is no such file, one is missing, or the index is invalid.
    """
    if (folder / INDEX_FILE).is_file():
        files = indexed_files(folder)
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ModelError(f"{folder} lacks {', '.join(absent)}, which {INDEX_FILE} names; download the model again")
        return files
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if any(file.suffix in PICKLE_SUFFIXES for file in folder.glob("*")):
        raise ModelError(
            f"{folder} holds weights in a pickle format (.bin), which can run code and is never loaded; "
            f"use the model's safetensors"
        )
    raise ModelError(f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def count_weights(folder: Path, stored: WeightFormat | None) -> int:
    """Return the number of weights of a folder, as the headers of its safetensors and its reference to a GGUF file say.

    Args:
        stored: the format of quantized weights; None if there are none.

    Raises:
        ModelError: a file or the index is missing or damaged.
    """
    tensors = stored_tensors(folder)
    if stored is None:
        in_files = sum(math.prod(shape) for _, _, shape in tensors)
    else:
        in_files = sum(stored.weights_in(name, dtype, shape) * math.prod(shape) for name, dtype, shape in tensors)
    mapped = read_reference(folder).matrices.values() if has_reference(folder) else ()
    return in_files + sum(math.prod(matrix.shape) for matrix in mapped)


def has_quantized(folder: Path, stored: WeightFormat) -> bool:
    """Return whether any matrix is quantized. A checkpoint's format may be that of its keys and values alone.

    Raises:
        ModelError: a file or the index is missing or damaged.
    """
    return any(name.endswith(tuple(stored.marks)) for name, _, _ in stored_tensors(folder))


def stored_tensors(folder: Path) -> list[tuple[str, str, list[int]]]:
    """Return the name, the dtype and the shape of each tensor in the safetensors files of a folder.

    Raises:
        ModelError: a file or the index is missing or damaged.
    """
    return [tensor for file in weight_files(folder) for tensor in _tensors_of_file(file)]


def _tensors_of_file(file: Path) -> list[tuple[str, str, list[int]]]:
    try:
        with file.open("rb") as source:
            length = int.from_bytes(source.read(_LENGTH_BYTES), "little")
            if length > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(source.read(length))
        return [(name, each["dtype"], each["shape"]) for name, each in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is damaged or not a safetensors file: {error}") from error


def indexed_files(folder: Path) -> list[Path]:
    """Return the safetensors files that a folder's index names, whether they exist or not.

    Raises:
        ModelError: the index cannot be read, or names files that may not be opened.
    """
    try:
        weight_map = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{folder / INDEX_FILE} cannot be read: {error}") from error
    # The index comes from others, and must not make us open files of other folders.
    outside = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if outside or not names:
        raise ModelError(
            f"{folder / INDEX_FILE} must name safetensors files of its own folder, not {outside or 'none'}"
        )
    return [folder / name for name in names]
