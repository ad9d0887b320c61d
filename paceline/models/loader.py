"""The loader of a model, which reads a checkpoint one tensor at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.config import ModelImpl, Quantization
from paceline.core.errors import ModelError
from paceline.kernels.interface import Kernels, PackedWeight
from paceline.kernels.quantized import BLOCK, QuantizedMatrix
from paceline.models import mxfp4
from paceline.models.base import Architecture, FusedExperts, Model
from paceline.models.compiled import CompiledModel
from paceline.models.config import implementation, read_assistant, read_config, read_encoders
from paceline.models.decoder import TEXT
from paceline.models.encoders.base import Encoders
from paceline.models.encoders.registry import make_encoders
from paceline.models.folder import weight_files
from paceline.models.gemma4_assistant import Gemma4Assistant
from paceline.models.identity import model_identity
from paceline.models.packed import Pack, packed_weights
from paceline.models.quantized import Packer, weights_of
from paceline.models.read_ahead import will_read
from paceline.models.registry import MODELS

_NAMED_AT_MOST = 5
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

log = logging.getLogger(__name__)

Built = TypeVar("Built")


def load_model(
    path: Path,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    packed_dir: Path | None = None,
    quantization: Quantization = "none",
    model_impl: ModelImpl = "auto",
    trust_remote_code: bool = False,
) -> Model:
    """Load the model of a Hugging Face folder with safetensors.

    Args:
        packed_dir: folder in which processes share packed weights; None packs into memory of this process.
        trust_remote_code: run code from the folder if `transformers` has none for the model.

    Raises:
        ConfigError: this folder or these kernels do not support `quantization`.
        ModelError: the folder cannot be read, or its tensors do not fit its config.json.
    """
    if implementation(path, model_impl) == "transformers":
        # Imported here, because other models do not need the package transformers.
        from paceline.models.transformers_backend.loader import load_transformers

        return load_transformers(path, dtype, kernels, device, packed_dir, quantization, trust_remote_code)
    config, packer = read_config(path), Packer(kernels, device, quantization)

    def build(pack: Pack) -> Architecture:
        checkpoint = Checkpoint(weight_files(path), dtype, device, pack)
        weights = weights_of(checkpoint, path, quantization)
        model = MODELS[config.architecture](config, weights, kernels)
        layers = range(config.num_layers, config.num_layers + config.unused_layers)
        unread = (*model.unread, *(f"model.layers.{layer}." for layer in layers))
        checkpoint.finish((*unread, *(("lm_head.weight",) if config.tie_word_embeddings else ())))
        return model

    return CompiledModel(_with_packed(build, path, dtype, packer, packed_dir), kernels)


def load_assistant(
    path: Path, dtype: torch.dtype, kernels: Kernels, device: torch.device, packed_dir: Path | None = None
) -> Gemma4Assistant:
    """Load a model that drafts with its target's keys and values. See `load_model`."""
    config = read_assistant(path)

    def build(pack: Pack) -> Gemma4Assistant:
        checkpoint = Checkpoint(weight_files(path), dtype, device, pack)
        model = Gemma4Assistant(config, checkpoint, kernels)
        checkpoint.finish(("lm_head.weight",))
        return model

    return _with_packed(build, path, dtype, Packer(kernels, device), packed_dir)


def load_encoders(
    path: Path,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    packed_dir: Path | None = None,
    model_impl: ModelImpl = "auto",
    trust_remote_code: bool = False,
) -> Encoders | None:
    """Load the encoders of a model for images, videos or audio, without its text model; None if it has none.

    Encoders are never quantized. See `load_model`.
    """
    if implementation(path, model_impl) == "transformers":
        from paceline.models.transformers_backend.images import load_images

        return load_images(path, dtype, kernels, device, trust_remote_code)
    config = read_encoders(path)
    if config is None:
        return None

    def build(pack: Pack) -> Encoders:
        checkpoint = Checkpoint(weight_files(path), dtype, device, pack)
        encoders = make_encoders(config, dtype, device, checkpoint, kernels)
        checkpoint.finish(TEXT)
        return encoders

    return _with_packed(build, path, dtype, Packer(kernels, device), packed_dir, "-encoders")


def _with_packed(
    build: Callable[[Pack], Built],
    path: Path,
    dtype: torch.dtype,
    packer: Packer,
    packed_dir: Path | None,
    part: str = "",
) -> Built:
    """Build a model with packed weights, which processes share in `packed_dir` if it is given.

    Args:
        part: a name for this part of the checkpoint; parts do not share a file.
    """
    if packed_dir is None or not packer.form:
        return build(packer)
    model = f"{path.name}{part}{packer.suffix}-{model_identity(path, str(dtype))[:16]}"
    return build(packed_weights(packed_dir, model, packer, build))


class Checkpoint:
    """`Weights` from safetensors files, which are mapped into memory."""

    def __init__(self, files: Iterable[Path], dtype: torch.dtype, device: torch.device, pack: Pack) -> None:
        self.pack = pack
        self.dtype = dtype
        self._device = device
        self._file_of: dict[str, tuple[Path, Any]] = {}
        for file in files:
            try:
                handle: Any = safe_open(file, framework="pt", device="cpu")
                self._file_of.update(dict.fromkeys(handle.keys(), (file, handle)))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} is damaged or not a safetensors file: {error}") from error
        self._missing: list[str] = []
        self._misshaped: list[str] = []

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self.take_table(name, *shape)
        # Without this call, the system reads megabytes around the first page that is touched.
        will_read(tensor)
        # A vector is copied, because a view of it would keep its whole file in memory.
        return tensor if tensor.is_meta else tensor.to(self._device, dtype or self.dtype, copy=tensor.dim() == 1)

    def take_table(self, name: str, *shape: int, dtypes: Sequence[torch.dtype] = _FLOATS) -> Tensor:
        place = self._find(name, shape)
        if place is None:
            return torch.empty(shape, device="meta")
        file, handle = place
        try:
            tensor: Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged: {error}") from error
        if tensor.dtype not in dtypes:
            raise ModelError(f"{file}: {name} has dtype {tensor.dtype}; quantized checkpoints are not supported")
        return tensor

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[Path, Any] | None:
        """Take a tensor of this shape, and return its file's path and handle. If there is none, return None."""
        if name not in self._file_of:
            self._missing.append(name)
            return None
        file, handle = self._file_of.pop(name)
        found = tuple(handle.get_slice(name).get_shape())
        if found != shape:
            self._misshaped.append(f"{name} is {list(found)} instead of {list(shape)}")
            return None
        return file, handle

    def take_indices(self, name: str, size: int) -> Tensor:
        tensor = self.take_table(name, size, dtypes=(torch.int64, torch.int32))
        return tensor if tensor.is_meta else tensor.to(self._device, torch.int64, copy=True)

    def has(self, name: str, *shape: int) -> bool:
        if name not in self._file_of or not shape:
            return name in self._file_of
        _, handle = self._file_of[name]
        return tuple(handle.get_slice(name).get_shape()) == shape

    def _take_matrix(self, name: str, *shape: int) -> Tensor:
        """Return a matrix for packing."""
        return self.take(name, *shape) if self.pack.needs_content else self._leave_unread(name, *shape)

    def _leave_unread(self, name: str, *shape: int) -> Tensor:
        """Take a matrix without reading it. safetensors would touch it, and the system read megabytes around it."""
        self._find(name, shape)
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def take_packed(self, name: str, *shape: int, order: Sequence[int] | None = None) -> PackedWeight:
        weight = self._take_matrix(name, *shape)
        return self.pack(name, weight if order is None else weight[list(order)])

    def take_packed_parts(
        self, name: str, sizes_out: Sequence[int], size_in: int, order: Sequence[int] | None = None
    ) -> list[PackedWeight]:
        weight = self._take_matrix(name, sum(sizes_out), size_in)
        parts = torch.split(weight if order is None else weight[list(order)], list(sizes_out))
        return [self.pack(f"{name}[{index}]", part) for index, part in enumerate(parts)]

    def take_packed_derived(
        self, name: str, shape: tuple[int, ...], derive: Sequence[Callable[[Tensor], Tensor]]
    ) -> list[PackedWeight]:
        weight = self._take_matrix(name, *shape)
        return [self.pack(f"{name}[{index}]", each(weight)) for index, each in enumerate(derive)]

    def take_packed_experts(self, name: str, shape: FusedExperts) -> list[list[PackedWeight]]:
        packed = [
            [self.pack(f"{name}[{expert}][{index}]", part) for index, part in enumerate(parts)]
            for expert, parts in enumerate(self.expert_parts(name, shape))
        ]
        return [list(part) for part in zip(*packed)]

    def expert_parts(self, name: str, shape: FusedExperts) -> Iterator[Sequence[Tensor | QuantizedMatrix]]:
        """Yield the parts of each expert's matrix. Only one expert at a time is copied or converted."""
        if f"{name}{mxfp4.BLOCKS}" in self._file_of:
            yield from self._mxfp4_parts(name, replace(shape, transposed=False))
            return
        take = self.take_table if self.pack.needs_content else self._leave_unread
        for matrix in take(name, *shape.shape):
            will_read(matrix)
            yield shape.parts(matrix if matrix.is_meta else matrix.to(self._device, self.dtype))

    def _mxfp4_parts(self, name: str, shape: FusedExperts) -> Iterator[Sequence[Tensor | QuantizedMatrix]]:
        experts, size_out, size_in = shape.shape
        counts = (experts, size_out, -(-size_in // BLOCK))
        take = partial(self.take_table, dtypes=(torch.uint8,)) if self.pack.needs_content else self._leave_unread
        blocks = take(f"{name}{mxfp4.BLOCKS}", *counts, mxfp4.BLOCK_BYTES)
        scales = take(f"{name}{mxfp4.SCALES}", *counts)
        if blocks.is_meta or scales.is_meta:
            for _ in range(experts):
                yield shape.parts(torch.empty(size_out, size_in, dtype=self.dtype, device="meta"))
            return
        for own, own_scales in zip(blocks, scales):
            will_read(own)
            will_read(own_scales)
            parts = zip(shape.parts(own), shape.parts(own_scales))
            yield [mxfp4.decode_mxfp4(*part, size_in, self.dtype) for part in parts]

    def leave(self, name: str) -> None:
        """Count a tensor as taken without reading it, because the caller reads it from another file."""
        if self._file_of.pop(name, None) is None:
            self._missing.append(name)

    def finish(self, unread: Sequence[str] = ()) -> None:
        """Close the files.

        Args:
            unread: beginnings of the names of tensors that the model does not read.

        Raises:
            ModelError: names the tensors that are missing, have another shape, or were not taken.
        """
        # Old checkpoints hold rotary frequencies, which are computed from the config here.
        left = [name for name in self._file_of if not name.endswith("rotary_emb.inv_freq")]
        surplus = [name for name in left if not name.startswith(tuple(unread))]
        if known := [name for name in left if name not in surplus]:
            log.info("%d tensors of the checkpoint are not used by this model: %s", len(known), _enumerate(known))
        self._file_of.clear()
        complaints = [
            f"{what}: {_enumerate(names)}"
            for what, names in (
                ("missing tensors", self._missing),
                ("tensors of another shape", self._misshaped),
                ("unexpected tensors", surplus),
            )
            if names
        ]
        if complaints:
            raise ModelError(f"the weights do not fit config.json: {'; '.join(complaints)}")


def _enumerate(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED_AT_MOST])
    more = len(names) - _NAMED_AT_MOST
    return f"{shown} and {more} more" if more > 0 else shown
