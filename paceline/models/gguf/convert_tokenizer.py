"""The converter of a tokenizer to tokenizer.json: `python -m paceline.models.gguf.convert_tokenizer SOURCE TARGET`.

It is a process of its own, so that the memory of transformers is free when it ends. If it fails, it exits with 1 and
prints the reason to standard output.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelError
from paceline.models.tokenizer_files import FAST, SENTENCEPIECE, TEKKEN, needed_package

_PROBE = "Hello, world 123"


def convert_tokenizer(source: Path, target: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of the model in `source` to `target`.

    Raises:
        ModelError: the tokenizer cannot be converted.
    """
    from transformers import AutoTokenizer
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    if (source / TEKKEN).is_file():
        tokenizer: Any = convert_tekken_tokenizer(str(source / TEKKEN))
    else:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise ModelError(f"its class {type(tokenizer).__name__} cannot be written as {FAST}")
    _check(tokenizer, source / SENTENCEPIECE)
    tokenizer.save_pretrained(target)


def _check(tokenizer: Any, model: Path) -> None:
    """Raise ModelError if a tokenizer does not restore a text, or does not encode it as the file `model` says.

    transformers raises nothing if a part of the vocabulary is lost, or if it finds no class for a tokenizer and so
    leaves out the rules by which the text is prepared.
    """
    ids = tokenizer.encode(_PROBE, add_special_tokens=False)
    said = tokenizer.decode(ids).strip()
    if said != _PROBE:
        raise ModelError(f"after the conversion, {_PROBE!r} becomes {said!r}")
    if model.is_file() and needed_package(model.parent) == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        if SentencePieceProcessor(model_file=str(model)).encode(_PROBE) != ids:
            raise ModelError(f"after the conversion, {_PROBE!r} has other tokens than {model.name} gives it")


def main() -> int:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        convert_tokenizer(source, target)
    except Exception as error:
        # transformers lets exceptions of any type of its libraries pass, and some of its texts fill a screen.
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        print(f"the tokenizer cannot be converted: {reason}; use a version of the model with {FAST}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
