"""Whether what drafts fits the model that it drafts for, as far as their folders tell. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from paceline.core.errors import ConfigError, ModelError
from paceline.core.speculative import SpeculativeConfig
from paceline.models.config import read_config
from paceline.models.folder import weight_files
from paceline.models.model_config import ModelConfig


def read_draft_config(speculative: SpeculativeConfig | None) -> ModelConfig | None:
    """The configuration of the draft model; None where there is none. Raises ConfigError where it cannot be loaded."""
    if speculative is None or speculative.method != "draft_model":
        return None
    folder = Path(speculative.model)
    if not folder.is_dir():
        raise ConfigError(
            f"--speculative-config: model {speculative.model} is not a folder; give that of a Hugging Face model "
            "(paceline prepare NAME prints that of a bundled one)"
        )
    try:
        weight_files(folder)
        return read_config(folder)
    except ModelError as error:
        raise ConfigError(f"--speculative-config: the draft model cannot be used: {error}") from error


def check_speculative(speculative: SpeculativeConfig | None, folder: Path) -> None:
    """Raises ConfigError where that cannot draft for the model in `folder`, and ModelError where that is none."""
    if speculative is None:
        return
    draft, target = read_draft_config(speculative), read_config(folder)
    if target.mamba is not None:
        raise ConfigError(
            "--speculative-config: this model has Mamba layers, whose states cannot go back behind a refused draft; "
            "serve it without the option"
        )
    if draft is not None and draft.mamba is not None:
        raise ConfigError(
            "--speculative-config: the draft model has Mamba layers, whose states cannot go back behind a refused "
            "draft; take one that has attention alone"
        )
    if draft is not None and draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"--speculative-config: the draft model knows {draft.vocab_size} tokens and the model {target.vocab_size}; "
            "take one with the same vocabulary, as a smaller model of the same family has"
        )
    if speculative.method == "early_layers" and speculative.num_layers >= target.num_layers:
        raise ConfigError(f"--speculative-config: num_layers must be below the model's {target.num_layers}")
