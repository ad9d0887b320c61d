"""The loader of models from Hugging Face folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from paceline.core.config import ChosenQuantization, ModelImpl
from paceline.core.errors import ConfigError
from paceline.kernels.interface import Kernels
from paceline.models.adapters.linears import NamedLinears
from paceline.models.adapters.loading import AdapterRules
from paceline.models.adapters.model_adapters import ModelAdapters
from paceline.models.base import Architecture, Model
from paceline.models.checkpoint import Checkpoint
from paceline.models.compiled import CompiledModel
from paceline.models.config import (
    implementation,
    read_assistant,
    read_config,
    read_encoders,
    read_format,
    weight_form,
)
from paceline.models.decoder import TEXT
from paceline.models.encoders.base import Encoders
from paceline.models.encoders.registry import make_encoders
from paceline.models.files.content import cache_key
from paceline.models.files.gguf_reference import has_reference
from paceline.models.folder import weight_files
from paceline.models.gemma4_assistant import Gemma4Assistant
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf_weights import GgufWeights
from paceline.models.identity import model_identity
from paceline.models.packing.packed import PACKING, Pack, packed_weights
from paceline.models.packing.quantized import Packer
from paceline.models.registry import MODELS

_HEADS = ("lm_head.weight", "language_model.lm_head.weight")

_POOLING_HEADS = ("score.", "custom_text_proj.", "embedding_proj_layer.", "vlm.lm_head.")
"""Beginnings of the names of tensors that poolers read."""

Built = TypeVar("Built")


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """The adapters that a model takes."""

    slots: int
    """Largest number of adapters in one batch."""
    rules: AdapterRules
    dtype: torch.dtype
    """Dtype of adapters in memory."""

    def deviation(self, dtype: torch.dtype) -> str:
        """Return how results differ from those of whole adapters in the model's dtype; "" if they do not.

        Args:
            dtype: dtype of the model.
        """
        rounded = "" if self.dtype == dtype else str(self.dtype).removeprefix("torch.")
        return " ".join(filter(None, [",".join(sorted(self.rules.only)), rounded]))


def load_model(
    path: Path,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    packed_dir: Path | None = None,
    quantization: ChosenQuantization = "auto",
    model_impl: ModelImpl = "auto",
    trust_remote_code: bool = False,
    adapters: AdapterChoice | None = None,
) -> Model:
    """Load the model of a Hugging Face folder with safetensors.

    Args:
        packed_dir: folder in which processes share packed weights; None packs into memory of this process.
        trust_remote_code: run code from the folder if `transformers` has none for the model.
        adapters: the adapters that the model takes; None if it takes none.

    Raises:
        ConfigError: this folder or these kernels do not support `quantization` or adapters.
        ModelError: the folder cannot be read, or its tensors do not fit its config.json.
    """
    if implementation(path, model_impl) == "transformers":
        if adapters is not None:
            raise ConfigError(
                f"--enable-lora: {path.name} is computed by its own code in transformers, which takes no adapters "
                "here; merge the adapter into the model"
            )
        # Imported here, because other models do not need the package transformers.
        from paceline.models.transformers_backend.loader import load_transformers

        return load_transformers(path, dtype, kernels, device, packed_dir, quantization, trust_remote_code)
    config, packer = read_config(path), Packer(kernels, device, weight_form(path, quantization))
    gguf = GgufFile(path) if has_reference(path) else None
    if quantization == "gguf":
        if gguf is None:
            raise ConfigError(
                f"--quantization gguf: {path} was not converted from a GGUF file, or an older version converted it; "
                "give serve or prepare the .gguf file or a bundled model's name, or choose --quantization int8"
            )
        gguf.check_packed()

    def build(pack: Pack) -> tuple[Architecture, NamedLinears]:
        checkpoint = Checkpoint(weight_files(path), dtype, device, pack, read_format(path))
        weights = checkpoint if gguf is None else GgufWeights(checkpoint, gguf, device)
        model = MODELS[config.architecture](config, weights, kernels)
        layers = range(config.num_layers, config.num_layers + config.unused_layers)
        unread = (*model.unread, *(f"model.layers.{layer}." for layer in layers))
        heads = _POOLING_HEADS if not config.has_head else _HEADS if config.tie_word_embeddings else ()
        weights.finish((*unread, *heads))
        return model, weights.linears

    model, linears = _with_packed(build, path, dtype, packer, packed_dir)
    if adapters is None:
        return CompiledModel(model, kernels)
    slots = adapters.slots, adapters.rules, adapters.dtype
    return CompiledModel(model, kernels, ModelAdapters(linears.layers, *slots, device, kernels))


def load_assistant(
    path: Path, dtype: torch.dtype, kernels: Kernels, device: torch.device, packed_dir: Path | None = None
) -> Gemma4Assistant:
    """Load a model that drafts with its target's keys and values. Arguments and errors are those of `load_model`."""
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

    Encoders are never quantized. Arguments and errors are those of `load_model`.
    """
    if implementation(path, model_impl) == "transformers":
        from paceline.models.transformers_backend.images import load_images

        return load_images(path, dtype, kernels, device, trust_remote_code)
    config = read_encoders(path)
    if config is None:
        return None

    def build(pack: Pack) -> Encoders:
        checkpoint = Checkpoint(weight_files(path), dtype, device, pack, read_format(path))
        encoders = make_encoders(config, dtype, device, checkpoint, kernels)
        checkpoint.finish((*TEXT, *_POOLING_HEADS))
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
        part: a name for this part of the checkpoint; parts do not share a folder.
    """
    if packed_dir is None or not packer.form:
        return build(packer)
    identity = model_identity(path, str(dtype))
    model = cache_key(f"{path.name}{part}{packer.suffix}", identity.digest, PACKING)
    built = build(packed_weights(packed_dir, model, packer, build, identity.content.check))
    identity.content.check()
    return built
