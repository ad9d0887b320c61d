"""Prompts for text between a prefix and a suffix, for models that have tokens for it."""

from __future__ import annotations

import re
from collections.abc import Container

from paceline.core.errors import InvalidRequestError

_FORMS = (
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",  # Qwen Coder, CodeGemma
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",  # StarCoder, Granite Code
    "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",  # SantaCoder
    "<|code_prefix|>{prefix}<|code_suffix|>{suffix}<|code_middle|>",  # GLM
    "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",  # DeepSeek Coder
    "<[fim-suffix]>{suffix}<[fim-prefix]>{prefix}<[fim-middle]>",  # Seed Coder
    "[SUFFIX]{suffix}[PREFIX]{prefix}",  # Codestral
)
"""Form of such a prompt for each family of models. The parts around `{prefix}` and `{suffix}` are special tokens."""


def fill_in_middle(prefix: str, suffix: str, own_tokens: Container[str]) -> str:
    """Return the prompt for the text between a prefix and a suffix.

    Args:
        own_tokens: the texts of the tokens that were added to the model's vocabulary.

    Raises:
        InvalidRequestError: the model has no tokens for such prompts.
    """
    for form in _FORMS:
        if all(piece in own_tokens for piece in re.split(r"\{\w+\}", form) if piece):
            return form.format(prefix=prefix, suffix=suffix)
    raise InvalidRequestError(
        "suffix: this model has no tokens that mark a prefix and a suffix; leave it out", "suffix"
    )
