"""Packed weights in a folder. They are packed once, and all workers of a host map its files and share their memory."""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import mmap
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.kernels.packed_weight import PackedWeight
from paceline.models.files.cache import OLD_PACKED, PACKED, UNFINISHED, mark_used
from paceline.models.files.file_lock import file_lock
from paceline.models.files.folder_lease import FolderLease, clear, remove_unless_leased
from paceline.models.files.read_ahead import read_ahead
from paceline.models.packing.packed_writing import LENGTH_BYTES, Place, write_packed
from paceline.models.packing.quantized import Matrix, Packer


class Pack(Protocol):
    """A function that packs the matrix of a given name, such as a `Packer`."""

    @property
    def needs_content(self) -> bool:
        """Whether this function reads the matrices. Otherwise, the matrices may be on the meta device."""

    def __call__(self, name: str, weight: Matrix, /) -> PackedWeight: ...


PACKING = 2
"""Version of the packing, which is a part of the name that `packed_weights` gets. Raise it when models name, cut or
order their matrices in another way, or a weight format reads or rounds them in another way, so that they are packed
again.
"""
_MOST_FORMS = 2
"""Number of folders kept for one model, each in another packing: enough to go back one release, or to alternate between
two.
"""

log = logging.getLogger(__name__)


def packed_weights(
    packed_dir: Path,
    model: str,
    packer: Packer,
    visit: Callable[[Pack], object],
    check: Callable[[], None] = lambda: None,
) -> Pack:
    """Return a `Pack` that takes a model's matrices from a folder. Write the folder first if it does not exist.

    If the folder cannot be kept, log a warning and return a `Pack` that packs into memory of this process.

    Args:
        packed_dir: folder that has the folders of all models.
        model: a name for the model's content and dtype, used as a prefix of the folder's name.
        packer: packs the matrices, if the folder does not have them yet.
        visit: calls a `Pack` with every matrix of the model.
        check: raises ModelError if the model's content has changed since its name was made.

    Raises:
        ModelError: the folder is damaged, or `visit` or `check` raises it.
    """
    folder = packed_dir / f"{model}-{packer.form}{PACKED}"
    try:
        if not folder.is_dir():
            packed_dir.mkdir(parents=True, exist_ok=True)
            with file_lock(packed_dir / f".{model}.lock", "packed weights", log.info):
                if not folder.is_dir():
                    _remove_unused(packed_dir, model)
                    write_packed(folder, packer, visit, check)
        lease = FolderLease(folder)
        mark_used(folder)
    except OSError as error:
        log.warning("this worker packs weights into its own memory, because %s cannot be kept: %s", folder, error)
        return packer
    return _PackedFolder(folder, packer, lease)


def _remove_unused(packed_dir: Path, model: str) -> None:
    """Remove what killed processes left, and the least recently used forms, to make room for one more.

    Forms in use stay.
    """

    def found(suffix: str) -> list[Path]:
        return list(packed_dir.glob(f"{glob.escape(model)}-*{suffix}"))

    for left in found(UNFINISHED):
        clear(left)
    forms = sorted(found(PACKED) + found(OLD_PACKED), key=lambda form: form.stat().st_mtime, reverse=True)
    for form in forms[_MOST_FORMS - 1 :]:
        remove_unless_leased(form, form)


class _LeasedMap(mmap.mmap):
    """A mapped file of a folder that stays in use until the last tensor of the map is gone."""

    lease: FolderLease


def _map(file: Path, lease: FolderLease) -> Tensor:
    """Map a file as uint8 [size], to read only. Processes share the file's pages."""
    with file.open("rb") as source:
        # The system refuses a private map that is larger than its memory, because all of it could be written.
        mapped = _LeasedMap(source.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.lease = lease
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the tensor must not be written
        return torch.frombuffer(mapped, dtype=torch.uint8)


class _PackedFolder:
    """A `Pack` that takes matrices from a folder that exists."""

    needs_content = False

    def __init__(self, folder: Path, packer: Packer, lease: FolderLease) -> None:
        self._folder = folder
        self._packer = packer
        self._places: dict[str, tuple[Tensor, Place]] = {}
        try:
            files = [_map(file, lease) for file in folder.iterdir()]
            for file in files:
                self._places |= {name: (file, place) for name, place in _read_index(file).items()}
        except (OSError, RuntimeError, ValueError) as error:
            raise self._damaged() from error
        read_ahead(files)

    def __call__(self, name: str, weight: Matrix) -> PackedWeight:
        packed = self._packer.without_data(weight)
        try:
            file, (start, end, layout) = self._places[name]
            data = file[start:end]
            found = replace(packed, data=data if layout else data.view(weight.dtype), format=layout)
            if self._packer.kernels.fits(found):
                return found
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise self._damaged() from error
        raise self._damaged()

    def _damaged(self) -> ModelError:
        return ModelError(f"{self._folder} is damaged; remove it, and the next start writes it again")


def _read_index(file: Tensor) -> dict[str, Place]:
    """Return the place of each matrix of a file, uint8 [size]. Raises ValueError if it has no index."""
    end = len(file) - LENGTH_BYTES
    length = int.from_bytes(file[max(end, 0) :].numpy().tobytes(), "little")
    if not 0 < length <= end:
        raise ValueError("the index is outside of the file")
    index: dict[str, Place] = json.loads(file[end - length : end].numpy().tobytes())
    if not isinstance(index, dict):
        raise ValueError("the index is no object")
    return index
