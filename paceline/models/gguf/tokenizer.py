"""The tokenizer of a GGUF file, as tokenizer.json. Imports no torch, and not transformers, which takes seconds.

A file has a vocabulary and, by name, the rules by which text is split before tokens are merged. Names of rules that are
not here are refused: the model would silently see token ids that it was not trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from paceline.models.gguf.metadata import Metadata
from paceline.models.gguf.reader import DamagedError

_PLACE = "tokenizer.ggml"
_TEMPLATE = "tokenizer.chat_template"
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that a text may have whole: those of control are special."""
_BLANK = "\u2581"
"""The character that stands for a space in a vocabulary of SentencePiece."""

# Patterns of text that is split before merging, by `tokenizer.ggml.pre`; "" for the pattern of GPT-2. \p{N}, \p{L} and
# so on are Unicode's classes of characters.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN_2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
SPLITS: Mapping[str, str] = {
    "gpt-2": "",
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "smaug-bpe": _LLAMA_3,
    "tekken": _TEKKEN,
    "smollm": "",
    "qwen2": _QWEN_2,
}
# Rules by which each digit is cut off first: "\n\n1" is "\n\n" and "1".
_SPLITS_DIGITS = ("smollm",)
# Rules whose vocabulary expects composed characters (NFC).
_SPLITS_COMPOSED = ("qwen2",)
# Rules that take a piece of text whole if it is a token, without merges.
_WHOLE_TOKENS = ("llama-bpe", "llama3", "llama-v3", "tekken")
# Rules by which raw prompts begin with BOS if the file does not say otherwise.
_BEGIN_WITH_BOS = ("llama-bpe", "llama3", "llama-v3")


def write_tokenizer(reader: GGUFReader, metadata: Metadata, target: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat templates of a file whose metadata were checked.

    Raises:
        DamagedError: a text is not UTF-8, or a merge is not one of two tokens.
    """
    kind = metadata["tokenizer.ggml.model"]
    try:
        tokens = _entries(reader, "tokens")
        build = _byte_level if kind == "gpt2" else _sentencepiece
        tokenizer = build(reader, metadata, tokens)
    except UnicodeDecodeError as error:
        raise DamagedError(f"its tokenizer has a text that is not UTF-8: {error}") from error
    named = {
        f"{name}_token": tokens[metadata[f"{_PLACE}.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"{_PLACE}.{key}_token_id" in metadata
    }
    types = _entries(reader, "token_type") if f"{_PLACE}.token_type" in metadata else ()
    _add_special(tokenizer, tokens, types, named)
    _add_ends(tokenizer, metadata, named)
    tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")
    for name, text in metadata.items():
        if name == _TEMPLATE:
            (target / "chat_template.jinja").write_text(text, encoding="utf-8")
        elif name.startswith(f"{_TEMPLATE}."):
            (target / "additional_chat_templates").mkdir(exist_ok=True)
            file = f"{name.removeprefix(f'{_TEMPLATE}.')}.jinja".replace("/", "_")
            (target / "additional_chat_templates" / file).write_text(text, encoding="utf-8")


def _entries(reader: GGUFReader, name: str) -> Any:
    """Return a list of the tokenizer."""
    return reader.fields[f"{_PLACE}.{name}"].contents()


def _merges(reader: GGUFReader) -> list[tuple[str, str]]:
    """Return the file's merges, the first one first."""
    found = []
    for text in _entries(reader, "merges"):
        left, _, right = text.partition(" ")
        found.append((left, right))
    return found


def _model(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], **more: Any) -> BPE:
    try:
        return BPE(dict(vocabulary), list(merges), **more)
    except Exception as error:  # the package raises Exception itself
        raise DamagedError(f"its tokenizer.ggml.merges do not fit its tokens: {error}") from error


def _byte_level(reader: GGUFReader, metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    """Return a tokenizer whose tokens spell bytes, one character for each."""
    split = metadata["tokenizer.ggml.pre"]
    spelling = _spelling()
    alphabet = set(spelling)
    vocabulary = {
        token if alphabet.issuperset(token) else "".join(spelling[byte] for byte in token.encode()): number
        for number, token in enumerate(tokens)
    }
    ends = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    tokenizer = Tokenizer(_model(vocabulary, _merges(reader), ignore_merges=split in _WHOLE_TOKENS, **ends))
    if split in _SPLITS_COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not SPLITS[split])
    if SPLITS[split]:
        first = pre_tokenizers.Split(Regex(SPLITS[split]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, whole])
    elif split in _SPLITS_DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    else:
        tokenizer.pre_tokenizer = whole
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _spelling() -> list[str]:
    """Return the character of each byte: printable ones stand for themselves, others begin at U+0100."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _sentencepiece(reader: GGUFReader, metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with SentencePiece's rules: those of Gemma, or those of Llama."""
    is_gemma = metadata.architecture.startswith("gemma")
    if metadata.architecture == "gemma3":
        # Files of Gemma spell tokens of several spaces with spaces.
        tokens = [_BLANK * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if f"{_PLACE}.merges" in metadata:
        merges = _merges(reader)
    elif is_gemma:
        merges = _merges_by(vocabulary, range(0, -len(tokens), -1))  # its scores do not tell the order of merges
    else:
        merges = _merges_by(vocabulary, _entries(reader, "scores"))
    unknown = {"unk_token": "<unk>"} if is_gemma else {}
    tokenizer = Tokenizer(_model(vocabulary, merges, fuse_unk=True, byte_fallback=True, **unknown))
    # Strip removes the space that is set before a text.
    parts = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_gemma:
        tokenizer.normalizer = normalizers.Replace(" ", _BLANK)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        prefix = metadata.get(f"{_PLACE}.add_space_prefix", True)
        scheme = "first" if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_BLANK, prepend_scheme=scheme, split=False)
        if prefix:
            parts.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _merges_by(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all merges of two tokens to a third one, those with the highest score of the third one first."""
    found = [
        (scores[number], place, len(right), left, right)
        for token, number in vocabulary.items()
        for place in range(1, len(token))
        if (left := token[:place]) in vocabulary and (right := token[place:]) in vocabulary
    ]
    found.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int], named: Mapping[str, str]) -> None:
    """Let texts have tokens of control, user-defined tokens and named ones whole."""
    control = [token for token, kind in zip(tokens, types) if kind == _CONTROL]
    special = {token: None for token in (*control, *named.values()) if tokenizer.token_to_id(token) is not None}
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    own = [
        token
        for token, kind in zip(tokens, types)
        if kind == _USER_DEFINED and tokenizer.token_to_id(token) is not None
    ]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in own if token not in special])


def _add_ends(tokenizer: Tokenizer, metadata: Metadata, named: Mapping[str, str]) -> None:
    """Set what raw prompts begin and end with."""
    is_sentencepiece = metadata["tokenizer.ggml.model"] != "gpt2"
    default = is_sentencepiece or metadata["tokenizer.ggml.pre"] in _BEGIN_WITH_BOS
    begins = metadata.get(f"{_PLACE}.add_bos_token", default) and "bos_token" in named
    ends = metadata.get(f"{_PLACE}.add_eos_token", False) and "eos_token" in named
    first, last = [named["bos_token"]] if begins else [], [named["eos_token"]] if ends else []

    def around(name: str, type_id: int) -> list[str]:
        return [f"{token}:{type_id}" for token in (*first, f"${name}", *last)]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=around("A", 0),
        pair=around("A", 0) + around("B", 1),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (*first, *last)],
    )
