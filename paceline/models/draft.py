"""Checks that a drafter fits its target model, as far as their folders tell. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from paceline.core.config import ModelImpl
from paceline.core.errors import ConfigError, ModelError
from paceline.core.speculative import SpeculativeConfig
from paceline.models.config import is_assistant, read_assistant, read_facts
from paceline.models.folder import weight_files
from paceline.models.model_config import Assistant, ModelConfig, ModelFacts


def is_draft_name(speculative: SpeculativeConfig | None) -> bool:
    """Return whether the draft model is given by a name, which `resolve_model` must turn into a folder first."""
    if speculative is None or speculative.method != "draft_model":
        return False
    return speculative.revision != "" or not Path(speculative.model).is_dir()


def read_draft_config(speculative: SpeculativeConfig | None, model_impl: ModelImpl = "auto") -> ModelFacts | None:
    """Return the draft model's configuration; None without a draft model. Raises ConfigError if it cannot be loaded."""
    if speculative is None or speculative.method != "draft_model":
        return None
    if is_draft_name(speculative):
        raise ConfigError(
            f"--speculative-config: model {speculative.model} is not a folder; give the folder of a Hugging Face "
            "model, without a revision (paceline prepare NAME prints the folder of a bundled model or one of the hub)"
        )
    folder = Path(speculative.model)
    try:
        weight_files(folder)
        return read_assistant(folder) if is_assistant(folder) else read_facts(folder, model_impl)
    except ModelError as error:
        raise ConfigError(f"--speculative-config: the draft model cannot be used: {error}") from error


def check_speculative(speculative: SpeculativeConfig | None, folder: Path, model_impl: ModelImpl = "auto") -> None:
    """Check that a drafter fits the model in `folder`.

    Raises:
        ConfigError: the drafter does not fit the model.
        ModelError: `folder` holds no model that can be served.
    """
    if speculative is None:
        return
    draft, target = read_draft_config(speculative, model_impl), read_facts(folder, model_impl)
    if draft is not None:
        check_vocabularies(draft, target)
        if isinstance(draft, ModelConfig) and draft.assistant is not None:
            _check_assistant(draft, draft.assistant, target)
    if speculative.method == "early_layers":
        if not isinstance(target, ModelConfig):
            raise ConfigError(
                "--speculative-config: early_layers needs a native model (--model-impl); choose ngram or draft_model"
            )
        if speculative.num_layers >= target.num_layers:
            raise ConfigError(f"--speculative-config: num_layers must be below the model's {target.num_layers}")


def _check_assistant(draft: ModelConfig, sizes: Assistant, target: ModelFacts) -> None:
    if not isinstance(target, ModelConfig) or target.gemma4 is None:
        raise ConfigError(
            "--speculative-config: the draft model is an assistant of Gemma 4, and the model is not a native Gemma 4 "
            "(--model-impl); choose another draft model"
        )
    problem = ""
    if sizes.target_size != target.hidden_size:
        problem = f"has hidden states of {sizes.target_size} elements, and the model's have {target.hidden_size}"
    for kind, attention in draft.attention.items():
        others = target.attention.get(kind)
        if others is None or (attention.head_dim, attention.window) != (others.head_dim, others.window):
            problem = problem or f"has other {kind} layers than the model"
        elif attention.num_heads % others.num_kv_heads:
            problem = (
                problem or f"has {attention.num_heads} heads, which cannot share {others.num_kv_heads} KV heads evenly"
            )
    if problem:
        raise ConfigError(
            f"--speculative-config: the assistant {problem}; choose the assistant that was released for this model"
        )


def check_vocabularies(draft: ModelFacts, target: ModelFacts) -> None:
    """Raise ConfigError if a draft model has another vocabulary than its target, as far as their sizes are known."""
    if draft.vocab_size and target.vocab_size and draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"--speculative-config: the vocabulary of the draft model has {draft.vocab_size} tokens and the model's "
            f"{target.vocab_size}; choose one with the same vocabulary, such as a smaller model of the same family"
        )
