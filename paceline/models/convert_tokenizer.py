"""The converter of a tokenizer to tokenizer.json: `python -m paceline.models.convert_tokenizer SOURCE TARGET`.

It is a process of its own for the same reasons as the converter of GGUF files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paceline.core.errors import ModelError
from paceline.models.tokenizer_files import FAST, TEKKEN

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
    # A conversion that has lost a part of the vocabulary may raise nothing.
    said = tokenizer.decode(tokenizer.encode(_PROBE, add_special_tokens=False)).strip() if tokenizer.is_fast else ""
    if said != _PROBE:
        raise ModelError(f"the converted tokenizer does not restore a text: {_PROBE!r} becomes {said!r}")
    tokenizer.save_pretrained(target)
    if not (target / FAST).is_file():
        raise ModelError(f"its class {type(tokenizer).__name__} cannot be written as {FAST}")


def main() -> int:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        convert_tokenizer(source, target)
    except Exception as error:
        # transformers lets exceptions of any type of its libraries pass. Only the first line helps a user.
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        print(f"the tokenizer cannot be converted: {reason}; use a version of the model with {FAST}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
