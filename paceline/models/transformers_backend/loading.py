"""The loading of a model's own code and weights by `transformers`, and the refusal of models that cannot be served
so.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from paceline.core.errors import ConfigError, ModelError
from paceline.models.checkpoint import refuse_misfits
from paceline.models.config.transformers import IMAGE_ARCHITECTURES
from paceline.models.files.gguf_reference import has_reference
from paceline.models.folder import weight_files
from paceline.models.gguf.file import read_whole
from paceline.models.transformers_backend.attention import NAME, register

_LONGEST_MESSAGE = 400

log = logging.getLogger(__name__)

_QUANTIZED = ("I8", "U8", "F8", "F6", "F4")
"""Beginnings of the names of dtypes that hold codes of quantized weights in safetensors."""
_SWITCHING_ROPES = ("dynamic", "longrope")
"""Types of rotary embeddings that change when a context grows beyond its original length."""


def load_config(folder: Path, trust_remote_code: bool) -> Any:
    """Return the `PretrainedConfig` of a folder.

    Raises:
        ConfigError: `transformers` is not installed.
        ModelError: `transformers` does not know the model, or refuses its config.json.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(
            f"--model-impl transformers needs the package transformers ({error}): pip install 'paceline[convert]'"
        ) from error
    with _loading(folder, trust_remote_code):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{folder}: {_name(config)} has an encoder, and only decoders are supported")
    return config


def check_config(folder: Path, trust_remote_code: bool) -> None:
    """Check, without weights, that `transformers` has a decoder for the model of a folder and that it keeps no states.

    Code from the folder may run if `trust_remote_code` is set.

    Raises:
        ConfigError: `transformers` is not installed.
        ModelError: the model cannot be served.
    """
    config = load_config(folder, trust_remote_code)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if getattr(kind, "_is_stateful", False):
            raise ModelError(f"{folder}: {kind.__name__} keeps states besides keys and values, which is not supported")
    elif not trust_remote_code and not reads_images(config):
        raise ModelError(f"{folder}: {_name(config)} is no causal language model of transformers")


def load_module(folder: Path, config: Any, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> Any:
    """Return the `PreTrainedModel` of a folder, with Paceline's attention in its text model.

    The weights are mapped from the files if they have this dtype.

    Raises:
        ModelError: `transformers` has no causal model of this kind or cannot load it, or weights do not fit it.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    files = weight_files(folder)
    register()
    config.use_cache = False
    config.return_dict = True
    with _loading(folder, trust_remote_code):
        auto: Any = AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM
        tensors = None
        if has_reference(folder):
            # transformers finds no matrices in the folder, so its class gets the tensors themselves.
            auto, tensors = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], read_whole(folder)
        causal, report = auto.from_pretrained(
            None if tensors else folder,
            state_dict=tensors,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are refused below, by name.
        )
        (causal.get_decoder() if reads_images(config) else causal).set_attn_implementation(NAME)
    _check_report(folder, report)
    _check_dtypes(files, report["unexpected_keys"])
    return causal.requires_grad_(False).eval().to(device)


def _check_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Raise ModelError if tensors are missing or have another shape. Log a warning if some are not used."""
    misshaped = [
        f"{name} is {list(found_shape)} instead of {list(wanted)}"
        for name, found_shape, wanted in report["mismatched_keys"]
    ]
    refuse_misfits(sorted(report["missing_keys"]), sorted(misshaped))
    if unused := sorted(report["unexpected_keys"]):
        log.warning(
            "%s: the model does not use %d of the tensors, such as %s; check that config.json fits the weights",
            folder,
            len(unused),
            unused[0],
        )


def _check_dtypes(files: Iterable[Path], unused: Container[str]) -> None:
    """Raise ModelError if a tensor of the model is quantized, because `transformers` would take codes for values.

    It knows them only by the `quantization_config` of config.json, which may be missing.
    """
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            dtypes = {name: tensors.get_slice(name).get_dtype() for name in sorted(tensors.keys())}
        for name, dtype in dtypes.items():
            # Old checkpoints have causal masks under such names. A bias is never quantized.
            is_mask = name.endswith("bias")
            if dtype.startswith(_QUANTIZED) and not is_mask and name not in unused:
                raise ModelError(f"{file}: {name} has dtype {dtype}; quantized checkpoints are not supported")


def reads_images(config: Any) -> bool:
    """Return whether the model of a config has an encoder of images that Paceline can use."""
    return _name(config) in IMAGE_ARCHITECTURES


def longest_context(config: Any) -> int:
    """Return the number of tokens of the longest context for which the model computes every token in the same way.

    Raises:
        ModelError: config.json does not say how long contexts may be.
    """
    text = config.get_text_config()
    limits = [_size(text, "max_position_embeddings") or _size(text, "max_seq_len") or 0]
    if not limits[0]:
        raise ModelError("config.json does not say the longest context (max_position_embeddings)")
    for rope in _ropes(getattr(text, "rope_parameters", None) or {}):
        if rope.get("rope_type") in _SWITCHING_ROPES:
            original = rope.get("original_max_position_embeddings") or _size(text, "original_max_position_embeddings")
            limits.append(int(original or limits[0]))
    return min(limits)


def _ropes(parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rotary embeddings of a config, which has one for all layers or one for each type of layer."""
    if "rope_type" in parameters:
        return [parameters]
    return [rope for rope in parameters.values() if isinstance(rope, Mapping)]


def _size(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and value > 0 else None


def _name(config: Any) -> str:
    return str((getattr(config, "architectures", None) or [config.model_type])[0])


@contextlib.contextmanager
def foreign_code(what: str) -> Iterator[None]:
    """Turn any exception from code of `transformers` or of a checkpoint into a ModelError that begins with `what`."""
    try:
        yield
    except (ConfigError, ModelError):
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST_MESSAGE]}"
        raise ModelError(f"{what} ({told})") from error


@contextlib.contextmanager
def _loading(folder: Path, trust_remote_code: bool) -> Iterator[None]:
    try:
        with _quiet(), foreign_code(f"{folder}: transformers cannot load this model"):
            yield
    except ModelError as error:
        if trust_remote_code or "trust_remote_code" not in str(error.__cause__):
            raise
        raise ModelError(
            f"{folder}: this model needs Python code from its folder (auto_map in config.json), which does not run "
            "unless --trust-remote-code is given; give it only if you would run that code as a program"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and warnings of `transformers` off the terminal."""
    import transformers

    theirs: Any = transformers.utils.logging
    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()
