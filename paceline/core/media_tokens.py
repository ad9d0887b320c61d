"""The tokens that stand for images, frames of videos and audio in a model's prompts, from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ModelError
from paceline.core.media import MediaKind


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """The tokens of a media input in a prompt: `begin`, a run of placeholders, `end`."""

    placeholder: int
    """It comes once for each row of the input's encoding."""
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Source:
    """Where config.json has the tokens of a kind. Each field has one of several names, and a default."""

    part: str
    """The object that config.json has if the model reads this kind."""
    placeholder: tuple[tuple[str, ...], int]
    begin: tuple[tuple[str, ...], int]
    end: tuple[tuple[str, ...], int]


def _names(name: str) -> tuple[str, ...]:
    return f"{name}_token_id", f"{name}_token_index"


_GEMMA3: Mapping[MediaKind, _Source] = {
    MediaKind.IMAGE: _Source(
        "vision_config", (_names("image"), 262_144), (_names("boi"), 255_999), (_names("eoi"), 256_000)
    )
}
_GEMMA4: Mapping[MediaKind, _Source] = {
    MediaKind.IMAGE: _Source(
        "vision_config", (_names("image"), 258_880), (_names("boi"), 255_999), (_names("eoi"), 258_882)
    ),
    MediaKind.VIDEO_FRAME: _Source(
        "vision_config", (_names("video"), 258_884), (_names("boi"), 255_999), (_names("eoi"), 258_882)
    ),
    MediaKind.AUDIO: _Source(
        "audio_config", (_names("audio"), 258_881), (_names("boa"), 256_000), (_names("eoa"), 258_883)
    ),
}
_SOURCES: Mapping[str, Mapping[MediaKind, _Source]] = {
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4,
}


def read_media_tokens(folder: Path) -> Mapping[MediaKind, MediaTokens]:
    """Return the tokens of each kind of media input that the model of a folder reads. A model of text reads none.

    Raises ModelError if config.json cannot be read, or has no number for a token.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        architecture = (config.get("architectures") or ["none"])[0]
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error

    def token(field: tuple[tuple[str, ...], int]) -> int:
        names, default = field
        found = next((config[name] for name in names if config.get(name) is not None), default)
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise ModelError(f"{path}: {names[0]} must be the id of a token, not {found!r}")
        return found

    return {
        kind: MediaTokens(token(source.placeholder), token(source.begin), token(source.end))
        for kind, source in _SOURCES.get(architecture, {}).items()
        if config.get(source.part) is not None
    }
