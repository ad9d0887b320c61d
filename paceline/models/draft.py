"""Checks that a drafter fits its target model, as far as their folders tell. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from paceline.core.errors import ConfigError, ModelError
from paceline.core.speculative import SpeculativeConfig
from paceline.models.config import read_config
from paceline.models.folder import weight_files
from paceline.models.model_config import ModelConfig


def read_draft_config(speculative: SpeculativeConfig | None) -> ModelConfig | None:
    """Return the draft model's configuration; None without a draft model. Raises ConfigError if it cannot be loaded."""
    if speculative is None or speculative.method != "draft_model":
        return None
    folder = Path(speculative.model)
    if not folder.is_dir():
        raise ConfigError(
            f"--speculative-config: model {speculative.model} is not a folder; give the folder of a Hugging Face model "
            "(paceline prepare NAME prints the folder of a bundled model)"
        )
    try:
        weight_files(folder)
        return read_config(folder)
    except ModelError as error:
        raise ConfigError(f"--speculative-config: the draft model cannot be used: {error}") from error


def check_speculative(speculative: SpeculativeConfig | None, folder: Path) -> None:
    """Check that a drafter fits the model in `folder`.

    Raises:
        ConfigError: it does not fit.
        ModelError: `folder` holds no model that can be served.
    """
    if speculative is None:
        return
    draft, target = read_draft_config(speculative), read_config(folder)
    if target.mamba is not None:
        raise ConfigError(
            "--speculative-config: this model has Mamba layers, whose states cannot be rolled back after a rejected "
            "draft; serve it without the option"
        )
    if draft is not None and draft.mamba is not None:
        raise ConfigError(
            "--speculative-config: the draft model has Mamba layers, whose states cannot be rolled back after a "
            "rejected draft; choose one that has attention layers only"
        )
    if draft is not None and draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"--speculative-config: the vocabulary of the draft model has {draft.vocab_size} tokens and the model's "
            f"{target.vocab_size}; choose one with the same vocabulary, such as a smaller model of the same family"
        )
    if speculative.method == "early_layers" and speculative.num_layers >= target.num_layers:
        raise ConfigError(f"--speculative-config: num_layers must be below the model's {target.num_layers}")
