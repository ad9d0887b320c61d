"""The reader of Hugging Face's config.json. No other package knows the fields of an architecture. Imports no torch.

Each family has a module here, which returns a `ModelConfig`. The gateway reads text settings (special tokens,
end-of-generation tokens, chat templates) from the folder itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from paceline.core.config import ChosenQuantization, ModelImpl, Quantization, WeightForm
from paceline.core.errors import ConfigError, ModelError
from paceline.core.online_quantization import OnlineQuantization, as_online
from paceline.core.options import alternatives
from paceline.core.pooling_facts import ENCODER_TYPES
from paceline.models.config.deepseek import deepseek_v2, deepseek_v3
from paceline.models.config.encoders import (
    gemma3_encoders,
    gemma4_encoders,
    gemma4_unified_encoders,
    qwen3_5_encoders,
    qwen3_vl_encoders,
)
from paceline.models.config.fields import Fields, Json, NotNativeError
from paceline.models.config.gemma3 import gemma3
from paceline.models.config.gemma4 import gemma4
from paceline.models.config.gemma4_assistant import gemma4_assistant
from paceline.models.config.gpt_oss import gpt_oss
from paceline.models.config.granite_hybrid import granite_hybrid
from paceline.models.config.granite_moe import granite_moe
from paceline.models.config.llama import llama, smollm3
from paceline.models.config.mistral import ministral3, mistral, mistral3
from paceline.models.config.mixtral import mixtral
from paceline.models.config.quantization_files import with_quantization
from paceline.models.config.qwen import qwen2, qwen3
from paceline.models.config.qwen3_moe import qwen3_moe
from paceline.models.config.qwen3_next import qwen3_5, qwen3_next
from paceline.models.config.qwen3_vl import qwen3_vl, qwen3_vl_moe
from paceline.models.config.retrievers import colpali, colpali_encoders, colqwen2, colqwen2_encoders
from paceline.models.config.text_encoders import TEXT_ENCODERS
from paceline.models.config.transformers import image_row_size, read_transformers
from paceline.models.encoder_config import EncodersConfig
from paceline.models.folder import has_quantized
from paceline.models.formats import WeightFormat, find_format
from paceline.models.formats.compressed_tensors import CompressedTensors
from paceline.models.model_config import ModelConfig, ModelFacts
from paceline.models.text_encoder_config import TextEncoderConfig

_Config = TypeVar("_Config", ModelConfig, EncodersConfig, TextEncoderConfig)

_READERS: Mapping[str, Callable[[Fields], ModelConfig]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MinistralForCausalLM": mistral,
    "Ministral3ForCausalLM": ministral3,
    "Mistral3ForConditionalGeneration": mistral3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "SmolLM3ForCausalLM": smollm3,
    "GptOssForCausalLM": gpt_oss,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "GraniteMoeForCausalLM": granite_moe,
    "MixtralForCausalLM": mixtral,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4ForConditionalGeneration": gemma4,
    "Gemma4UnifiedForCausalLM": gemma4,
    "Gemma4UnifiedForConditionalGeneration": gemma4,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5,
    "Qwen3VLForConditionalGeneration": qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl_moe,
    "ColPaliForRetrieval": colpali,
    "ColQwen2ForRetrieval": colqwen2,
}

_WITHOUT_HEAD = (
    *("TextModel", "Model", "TextForSequenceClassification", "ForSequenceClassification", "ForTokenClassification"),
    *("ForRewardModel", "ForProcessRewardModel"),
)
"""Ends of the names of architectures that are a causal model's layers without its head, perhaps with another one. They
stand in place of "ForCausalLM".
"""

_RETRIEVERS: Mapping[str, str] = {"ColQwen3_5": "Qwen3_5ForConditionalGeneration"}
"""The model whose layers and encoders an architecture has that gives a vector of each token."""

_ENCODERS: Mapping[str, Callable[[Fields], EncodersConfig]] = {
    "Gemma3ForConditionalGeneration": gemma3_encoders,
    "Gemma4ForConditionalGeneration": gemma4_encoders,
    "Gemma4UnifiedForConditionalGeneration": gemma4_unified_encoders,
    "Qwen3_5ForConditionalGeneration": qwen3_5_encoders,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_encoders,
    "Qwen3VLForConditionalGeneration": qwen3_vl_encoders,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl_encoders,
    "ColPaliForRetrieval": colpali_encoders,
    "ColQwen2ForRetrieval": colqwen2_encoders,
}

_ASSISTANTS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")


def is_assistant(folder: Path) -> bool:
    """Return whether a folder has an assistant: a model that only drafts for another model and reads its keys and
    values.
    """
    return _architecture(_read_settings(folder)) in _ASSISTANTS


def implementation(folder: Path, model_impl: ModelImpl) -> Literal["native", "transformers"]:
    """Return which code computes the model of a folder: Paceline's own ("native") or the model's ("transformers").

    Raises:
        ModelError: config.json cannot be read, or describes a model that only drafts for another.
    """
    if is_assistant(folder):
        raise ModelError(
            f"{folder} has an assistant, which only drafts for a Gemma 4; give it as model in --speculative-config"
        )
    if model_impl != "auto":
        return model_impl
    return "native" if causal_name(_architecture(_read_settings(folder))) in _READERS else "transformers"


def causal_name(architecture: str) -> str:
    """Return the causal model whose layers an architecture has, such as Qwen3ForCausalLM for Qwen3Model; `architecture`
    itself if it has a head for the next token, or if no model file here has its layers.
    """
    if architecture in _RETRIEVERS:
        return _RETRIEVERS[architecture]
    stems = (architecture.removesuffix(end) for end in _WITHOUT_HEAD if architecture.endswith(end))
    names = (f"{stem}ForCausalLM" for stem in stems)
    return next((name for name in names if name in _READERS), architecture)


def with_media(architecture: str) -> str:
    """Return the model whose encoders an architecture has; `architecture` itself unless it retrieves pages."""
    return _RETRIEVERS.get(architecture, architecture)


def read_facts(folder: Path, model_impl: ModelImpl) -> ModelFacts:
    """Return the facts about a model from its config.json, for either code.

    Raises:
        ModelError: config.json cannot be read, or describes a model that this code does not compute.
    """
    if implementation(folder, model_impl) == "native":
        return read_config(folder)
    raw = _read_settings(folder)
    try:
        return read_transformers(raw, _architecture(raw))
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from None


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration of a Hugging Face model folder.

    Raises:
        ModelError: config.json cannot be read, or describes a model that no model file of Paceline computes.
    """
    return _read(folder, _READERS)


def read_format(folder: Path) -> WeightFormat | None:
    """Return the format of a folder's quantized matrices; None if no matrix is quantized.

    Raises:
        ModelError: config.json cannot be read, or names a format that Paceline does not read.
    """
    raw = _read_settings(folder)
    nested = raw.get("text_config")
    try:
        return find_format(raw) or (find_format(nested) if isinstance(nested, Mapping) else None)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from None


def rounds_input(folder: Path) -> bool:
    """Return whether the checkpoint's format rounds activations before products (W8A8).

    Raises:
        ModelError: as `read_format`.
    """
    stored = read_format(folder)
    return isinstance(stored, CompressedTensors) and stored.rounds_input


def weight_form(folder: Path, quantization: ChosenQuantization) -> WeightForm:
    """Return the form of a model's matrices in memory.

    Raises:
        ConfigError: the quantization is unknown, or would round quantized matrices once more.
        ModelError: as `read_format`.
    """
    if quantization == "none" or quantization == "gguf":
        return quantization
    online = as_online(quantization)
    if online is None and quantization != "auto":
        raise ConfigError(f"--quantization must be {alternatives(Quantization)}, not {quantization!r}")
    stored = read_format(folder)
    if online is None:
        return "none" if stored is None else "checkpoint"
    # Signed bytes with scales hold what other formats have, so nothing is lost.
    if stored is not None and online != OnlineQuantization.of("int8") and has_quantized(folder, stored):
        raise ConfigError(
            f"the matrices of {folder.name} are quantized as {stored.name} already, and rounding them to {online} "
            "would lose more; leave out --quantization and --quantization-config, or take the checkpoint in bf16"
        )
    return online


def read_encoders(folder: Path) -> EncodersConfig | None:
    """Return the configuration of a model's encoders; None if Paceline computes none of them.

    Raises:
        ModelError: config.json cannot be read, or describes encoders that Paceline does not compute.
    """
    if with_media(_architecture(_read_settings(folder))) not in _ENCODERS:
        return None
    config = _read(folder, _ENCODERS)
    return None if config.vision is None and config.audio is None else config


def encoding_size(folder: Path, model_impl: ModelImpl) -> int:
    """Return the number of elements of a row of an encoding; 0 if the model has no encoders that Paceline can use."""
    if implementation(folder, model_impl) != "native":
        raw = _read_settings(folder)
        return image_row_size(raw, _architecture(raw))
    encoders = read_encoders(folder)
    return 0 if encoders is None else encoders.row_size


def has_native_encoders(folder: Path, model_impl: ModelImpl) -> bool:
    """Return whether the model of a folder has encoders that a worker can load without the text model."""
    return implementation(folder, model_impl) == "native" and read_encoders(folder) is not None


def read_assistant(folder: Path) -> ModelConfig:
    """Return the configuration of an assistant (`is_assistant`). Raises ModelError if config.json cannot be read or is
    unfit.
    """
    return _read(folder, dict.fromkeys(_ASSISTANTS, gemma4_assistant))


def _read(folder: Path, readers: Mapping[str, Callable[[Fields], _Config]]) -> _Config:
    raw = _read_settings(folder)
    stored = _architecture(raw)
    architecture = causal_name(stored) if readers is _READERS else with_media(stored)
    reader = readers.get(architecture)
    if reader is None:
        known = ", ".join(readers)
        raise ModelError(f"{folder}: architecture {architecture} is not supported; supported are: {known}")
    config = _read_fields(folder, Fields(raw, architecture), reader)
    if not isinstance(config, ModelConfig):
        return config
    return replace(config, has_head=architecture == stored and not architecture.endswith("ForRetrieval"))


def check_text_encoder(folder: Path) -> bool:
    """Return whether config.json describes an encoder of text, or a table of vectors.

    Raises ModelError if config.json cannot be read, or describes an encoder that Paceline does not compute.
    """
    kind = str(_read_settings(folder).get("model_type"))
    if kind in TEXT_ENCODERS:
        read_text_encoder(folder)
    return kind in ENCODER_TYPES


def read_text_encoder(folder: Path) -> TextEncoderConfig:
    """Return the configuration of an encoder of text.

    Raises ModelError if config.json cannot be read, or describes an encoder that Paceline does not compute.
    """
    raw = _read_settings(folder)
    kind = str(raw.get("model_type"))
    if kind not in TEXT_ENCODERS:
        known = ", ".join(TEXT_ENCODERS)
        raise ModelError(f"{folder}: an encoder of text of the type {kind} is not supported; supported are: {known}")
    return _read_fields(folder, Fields(raw, _architecture(raw)), TEXT_ENCODERS[kind])


def _read_fields(folder: Path, fields: Fields, reader: Callable[[Fields], _Config]) -> _Config:
    """Call a reader of config.json, and let errors name the file."""
    try:
        fields.refuse_unsupported()
        config = reader(fields)
        if isinstance(config, ModelConfig):
            _check_shapes(config)
    except NotNativeError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}; --model-impl transformers may compute it") from None
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"{folder / 'config.json'}: a field has a value of the wrong kind: {error}") from error
    return config


def _architecture(raw: Json) -> str:
    return str((raw.get("architectures") or ["none"])[0])


def _check_shapes(config: ModelConfig) -> None:
    for attention in config.attention.values():
        if attention.num_heads % attention.num_kv_heads:
            raise ModelError(f"{attention.num_heads} heads cannot share {attention.num_kv_heads} KV heads evenly")
        if attention.head_dim % 2:
            raise ModelError(f"head_dim must be even for the rotary embedding, not {attention.head_dim}")
    if (experts := config.experts) is not None:
        routing, count, groups = experts.routing, experts.count, experts.routing.groups
        choices = count // groups * routing.top_groups
        if count % groups or routing.top_groups > groups:
            raise ModelError(
                f"the number of groups ({groups}) must divide the number of experts ({count}), and a token must have "
                f"at most that many groups, not {routing.top_groups}"
            )
        if routing.top_k > choices:
            raise ModelError(f"a token cannot have {routing.top_k} experts: it chooses among {choices}")
        if routing.group_score == "top2" and count // groups < 2:
            raise ModelError(f"groups are scored by their two best experts, so each of {groups} groups needs two")


def _read_settings(folder: Path) -> Json:
    """Return the content of config.json, with what files beside it say of quantized weights."""
    return with_quantization(_read_json(folder / "config.json"), folder)


def _read_json(path: Path) -> Json:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    names = content.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{path}: architectures must be a list of names, not {names!r}")
    return content
