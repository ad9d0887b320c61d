"""The loader of encoders of text with their heads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from paceline.core.config import ChosenQuantization
from paceline.core.errors import ModelError
from paceline.core.pooling_config import DenseModule, PoolingConfig
from paceline.core.pooling_files import BGE_M3_FILES
from paceline.core.pooling_folder import read_pooling_config
from paceline.kernels.interface import Kernels
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import read_format, read_text_encoder, weight_form
from paceline.models.folder import stored_tensors, weight_files
from paceline.models.packing.packed import Pack
from paceline.models.packing.quantized import Packer
from paceline.models.pooling.heads import take_head
from paceline.models.pooling.model import PoolingModel
from paceline.models.pooling.pooler import Pooler, TokenHeads
from paceline.models.pooling.static import load_table
from paceline.models.pooling.text_encoders.base import TextEncoder, TextPass
from paceline.models.pooling.text_encoders.modernbert import PreNormEncoder
from paceline.models.pooling.text_encoders.post_norm import PostNormEncoder
from paceline.models.pooling.vectors import VectorLinear, Vectors, check_tensors, read_tensors
from paceline.models.pooling.words import load_words
from paceline.models.text_encoder_config import TextEncoderConfig

_PLACES = (
    *("", "bert.", "roberta.", "camembert.", "distilbert.", "electra.", "mpnet.", "nomic_bert.", "gte.", "new."),
    "model.",
)
"""What the names of an encoder's tensors may begin with."""
_UNREAD = (
    *("pooler.", "cls.", "lm_head.", "head.", "decoder.", "embeddings.position_ids", "vocab_", "discriminator_"),
    *("generator_",),
)
"""Beginnings of the names of tensors that encoders without labels do not need: heads that only training used, or of
which `words.py` reads its own.
"""


def load_pooling_model(
    folder: Path,
    dtype: torch.dtype | None,
    kernels: Kernels,
    device: torch.device,
    quantization: ChosenQuantization = "auto",
) -> PoolingModel:
    """Load an encoder of text.

    Args:
        dtype: fp32 or bf16; None is bf16 if the checkpoint has bf16, otherwise fp32.

    Raises:
        ConfigError: this folder or these kernels do not support `quantization`.
        ModelError: the folder cannot be read, does not say how to pool, or its tensors do not fit its config.
    """
    config = read_pooling_config(folder)
    if config is None or not config.is_encoder:
        raise ModelError(f"{folder} has no encoder of text; prefill workers compute causal models")
    if config.is_static:
        return PoolingModel(config, load_table(folder, config, device), Pooler(config, folder, kernels, device))
    encoder_config = read_text_encoder(folder)
    if dtype is None:
        dtype = stored_dtype(folder)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ModelError("encoders of text are computed in bfloat16 or float32: float16 is too narrow for some of them")
    packer = Packer(kernels, device, weight_form(folder, quantization))
    return _build(folder, config, encoder_config, dtype, kernels, device, packer)


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype in which an encoder is computed by default: bf16 if all its weights have it, otherwise fp32."""
    floats = {dtype for _, dtype, _ in stored_tensors(folder) if dtype in ("F32", "F16", "BF16", "F64")}
    return torch.bfloat16 if floats == {"BF16"} else torch.float32


def _build(
    folder: Path,
    config: PoolingConfig,
    encoder_config: TextEncoderConfig,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    pack: Pack,
) -> PoolingModel:
    checkpoint = Checkpoint(weight_files(folder), dtype, device, pack, read_format(folder))
    place = next((each for each in _PLACES if checkpoint.has(f"{each}{_words(encoder_config)}")), "")
    kind = PostNormEncoder if encoder_config.norms == "after" else PreNormEncoder
    encoder: TextEncoder = kind(encoder_config, checkpoint, place, device, kernels)
    head = take_head(config, encoder_config, checkpoint, place, kernels)
    own = [
        f"{module.name}." for module in config.token_modules if isinstance(module, DenseModule) and not module.folder
    ]
    unread = () if config.labels else (*_UNREAD, *own)
    checkpoint.finish((*unread, *(f"{place}{each}" for each in ("pooler.", "embeddings.position_ids"))))
    token_heads = _token_heads(folder, config, kernels, device) if config.dense_tokens else None
    words = None
    if config.splade is not None:
        words = load_words(folder, encoder_config, f"{place}{_words(encoder_config)}", kernels, device)
    pooler = Pooler(config, folder, kernels, device, head, token_heads, words)
    return PoolingModel(config, TextPass(encoder, dtype, device, kernels), pooler)


def _words(config: TextEncoderConfig) -> str:
    return "embeddings.word_embeddings.weight" if config.norms == "after" else "embeddings.tok_embeddings.weight"


def _token_heads(folder: Path, config: PoolingConfig, kernels: Kernels, device: torch.device) -> TokenHeads:
    sparse, vectors = (_token_head(folder / name, config.hidden_size, kernels, device) for name in BGE_M3_FILES)
    return TokenHeads(sparse, vectors)


def _token_head(path: Path, size_in: int, kernels: Kernels, device: torch.device) -> Vectors:
    """Return a linear layer from a file of its own."""
    tensors = read_tensors(path, device)
    size_out = 1 if path.name.startswith("sparse") else len(tensors.get("bias", torch.empty(0)))
    needed: Mapping[str, tuple[int, ...]] = {"weight": (size_out, size_in), "bias": (size_out,)}
    try:
        check_tensors(tensors, needed)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    return VectorLinear(tensors["weight"], tensors["bias"], kernels)
