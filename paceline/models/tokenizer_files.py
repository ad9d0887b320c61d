"""The files from which a tokenizer can be made. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from paceline.core.errors import ModelError

FAST = "tokenizer.json"
"""The form in which the gateway reads a tokenizer. Other forms are converted to it."""
TEKKEN = "tekken.json"
SENTENCEPIECE = "tokenizer.model"
_TIKTOKEN = "tiktoken.model"
_BYTE_PAIRS = ("vocab.json", "merges.txt")
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


def tokenizer_files(names: Iterable[str]) -> list[str]:
    """Return the names of the files that the tokenizer is read from, among the names of a model's files.

    tokenizer.json is enough. Without tokenizer.json, the result has all files from which it can be made; [] if there
    are none.
    """
    known = set(names)
    if FAST in known:
        return [FAST]
    found = [name for name in (TEKKEN, SENTENCEPIECE, _TIKTOKEN) if name in known]
    if known.issuperset(_BYTE_PAIRS):
        found += _BYTE_PAIRS
    return sorted([*found, *(known & {"added_tokens.json"})]) if found else []


def needed_package(folder: Path) -> str:
    """Return pip's name of the package that converts the tokenizer in `folder`; "" if no package is needed.

    Raises:
        ModelError: the conversion would not restore how the tokenizer splits text.
    """
    if (folder / TEKKEN).is_file():
        return "mistral-common"
    for name in (SENTENCEPIECE, _TIKTOKEN):
        if (folder / name).is_file():
            return _package_of(folder, name)
    return ""


def _package_of(folder: Path, name: str) -> str:
    with (folder / name).open("rb") as file:
        is_tiktoken = _TIKTOKEN_LINE.match(file.readline(4096)) is not None
    if not is_tiktoken:
        return "sentencepiece"
    # A tiktoken file holds no rule by which text is split before merging. transformers takes Llama 3's.
    if _model_type(folder) != "llama":
        raise ModelError(
            f"{folder / name} does not say how the tokenizer splits text; use a version of the model with {FAST}"
        )
    return "tiktoken"


def _model_type(folder: Path) -> str:
    try:
        return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def is_template(name: str) -> bool:
    """Return whether a file of a model holds chat templates."""
    known = ("chat_template.jinja", "chat_template.json")
    return name in known or fnmatchcase(name, "additional_chat_templates/*.jinja")
