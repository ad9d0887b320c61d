"""The loader of models that run in their own code in `transformers`."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.core.config import ChosenQuantization
from paceline.core.errors import ConfigError
from paceline.kernels.interface import Kernels
from paceline.models.config import weight_form
from paceline.models.files.content import cache_key
from paceline.models.identity import implementation_name, model_identity
from paceline.models.packing.packed import PACKING, Pack, packed_weights
from paceline.models.packing.quantized import Packer
from paceline.models.transformers_backend.model import TransformersModel


def load_transformers(
    folder: Path,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    packed_dir: Path | None,
    quantization: ChosenQuantization,
    trust_remote_code: bool,
) -> TransformersModel:
    """Load a model in its own code. Arguments and errors are those of `load_model`."""
    if quantization == "gguf":
        raise ConfigError("--quantization gguf needs a native model (--model-impl); choose int8 or none")

    identity = model_identity(folder, str(dtype), code=implementation_name(folder, "transformers"))

    def build(own: Pack) -> TransformersModel:
        return TransformersModel(folder, dtype, kernels, device, own, trust_remote_code)

    packer = Packer(kernels, device, weight_form(folder, quantization))
    pack: Pack = packer
    if packed_dir is not None and packer.form:
        name = cache_key(f"{folder.name}{packer.suffix}", identity.digest, PACKING)
        pack = packed_weights(packed_dir, name, packer, build, identity.content.check)
    model = build(pack)
    identity.content.check()
    model.prepare()
    return model
