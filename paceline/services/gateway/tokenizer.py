"""The tokenizer, with the bytes of every token, so that text can be joined token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from paceline.core.config import GenerationConfig
from paceline.core.errors import ConfigError, InvalidRequestError, ModelError
from paceline.services.gateway.answers.expressions import Spelling
from paceline.services.gateway.chat_template import ChatTemplate, Message


class Vocabulary:
    """The bytes of each token id.

    A token may be a part of a character, so it stands for bytes and not for text. Both families of tokenizers that
    cover all bytes are supported: byte-level BPE, and SentencePiece with byte fallback.

    Raises:
        ModelError: the tokenizer's decoder does not work on bytes.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._steps = _decoder_steps(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        """Ids of the tokens that stand for a fixed text, such as a marker of reasoning, by text."""

    @cached_property
    def spelling(self) -> Spelling:
        """How texts are written in grammars. Made once, because a model may have thousands of added tokens.

        The grammar library takes an added token for text, unless it is special or in angle brackets.
        """
        tokens = self.added_tokens.items()
        return Spelling(
            {text: own for text, own in tokens if own in self.special_ids or (text[:1], text[-1:]) == ("<", ">")}
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for an id without a token, such as the padding of a vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(self._tokenizer.id_to_token(token_id) or "")
        return known

    def token_text(self, token_id: int) -> str:
        """Return a token alone as text; a part of a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _spell(self, token: str) -> bytes:
        for step in self._steps:
            kind = step["type"]
            if kind == "ByteLevel":
                alphabet = self._byte_alphabet
                # An added token may have characters outside the alphabet, such as a space. It is its own text.
                return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()
            if kind == "ByteFallback" and (match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)):
                return bytes.fromhex(match[1])
            if kind == "Replace":
                token = token.replace(step["pattern"]["String"], step["content"])
            if kind == "Metaspace":
                token = token.replace(step["replacement"], " ")
        return token.encode()

    @cached_property
    def _byte_alphabet(self) -> dict[str, int]:
        """GPT-2's alphabet, character to byte: printable bytes are themselves, all others follow from U+0100 on."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {"type": "none"}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    # Fuse only joins. Strip removes a space at the start of a whole text; generated text continues a prompt.
    known = {"ByteLevel", "ByteFallback", "Metaspace", "Fuse", "Strip"}
    for step in steps:
        if step["type"] not in known and not (step["type"] == "Replace" and "String" in step["pattern"]):
            raise ModelError(
                f"tokenizer.json has a decoder of type {step['type']}, which cannot be decoded token by token"
            )
    return steps


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters for requests that leave them out: the model's own, or else OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 0
    """Longest answer to a chat, in tokens; 0 if only the context limits it."""

    @staticmethod
    def from_generation_config(values: Mapping[str, Any]) -> SamplingDefaults:
        """Return the defaults of a model with these values in its generation_config.json.

        Raises ModelError if a request could not have one of the values.
        """
        known = {name: values[name] for name in SamplingDefaults.__slots__ if values.get(name) is not None}
        for name, value in known.items():
            least, most = _RANGES[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ModelError(
                    f"generation_config.json: {name} must be a number from {least:g} to {most:g}, not {value!r}; "
                    "correct it, or start with --generation-config none"
                )
        return SamplingDefaults(**known)


_RANGES = {
    "temperature": (0, 2),
    "top_p": (1e-9, 1),
    "top_k": (-1, 2**31),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "max_new_tokens": (1, 2**31),
}
"""The numbers that requests accept."""


class Tokenizer:
    """A model's tokenizer: text to token ids and back, and the chat template.

    Args:
        folder: must have tokenizer.json; tokenizer_config.json, generation_config.json and config.json are optional.
        chat_template: a file that replaces the model's own template.
        generation_config: "none" ignores the sampling parameters in generation_config.json.

    Raises:
        ModelError: the folder does not hold a tokenizer that can be read.
        ConfigError: `chat_template` cannot be read.
    """

    def __init__(
        self, folder: Path, chat_template: Path | None = None, generation_config: GenerationConfig = "auto"
    ) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json; MODEL must be the model's Hugging Face folder")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"cannot read {path}: {error}") from error
        # Truncation and padding are for training. A prompt is never truncated or padded silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        model = _read_json(folder / "config.json")
        special_tokens = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **settings})

        self.vocabulary = Vocabulary(self._tokenizer)
        self.vocab_size: int = _text_value(model, "vocab_size") or self._tokenizer.get_vocab_size()
        """Width of the logits: every token id is lower."""
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        """Upper bound of the characters that one token stands for."""
        self.eos_token_ids = self._eos_token_ids(generation, model, special_tokens)
        self.defaults = SamplingDefaults.from_generation_config(generation if generation_config == "auto" else {})
        source = _chat_template_source(folder, settings, chat_template)
        self._special_tokens = special_tokens
        self._chat_template = ChatTemplate(source, special_tokens) if source is not None else None

    def encode(self, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Return a text's token ids. Raises InvalidRequestError, which names `param`, if it is not valid Unicode."""
        try:
            # Unlike `encode`, the batch form lets other Python threads run.
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except (UnicodeEncodeError, TypeError) as error:
            message = f"{param}: the text is not valid Unicode (it holds half of a surrogate pair); send it in UTF-8"
            raise InvalidRequestError(message, param) from error
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def token_string(self, token_id: int) -> str:
        """Return the vocabulary's own spelling of a token; "" for an id without a token."""
        return self._tokenizer.id_to_token(token_id) or ""

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a conversation, as ChatTemplate.render. Raises InvalidRequestError if the model has no template."""
        if self._chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template (it is a base model); use /v1/completions, "
                "or start the gateway with --chat-template FILE",
                "messages",
            )
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=tools,
        )

    def template(self, source: str) -> ChatTemplate:
        """Return a template with the model's special tokens. Raises the errors of ChatTemplate."""
        return ChatTemplate(source, self._special_tokens)

    @property
    def chat_template_source(self) -> str:
        """The Jinja text of the chat template; "" if there is none."""
        return self._chat_template.source if self._chat_template is not None else ""

    def _eos_token_ids(
        self, generation: Mapping[str, Any], model: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> frozenset[int]:
        listed = generation.get("eos_token_id")
        if listed is None:
            listed = _text_value(model, "eos_token_id")
        ids = {listed} if isinstance(listed, int) else set(listed or ())
        # A chat model's config may still name the base model's end of text; its tokenizer knows the end of a turn.
        own = self._tokenizer.token_to_id(special_tokens.get("eos_token", ""))
        return frozenset(ids if own is None else ids | {own})


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return values


def _text_value(config: Mapping[str, Any], name: str) -> Any:
    """Return a value of config.json. Multimodal models have the language model's values in `text_config`."""
    value = config.get(name)
    return value if value is not None else config.get("text_config", {}).get(name)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _chat_template_source(folder: Path, settings: Mapping[str, Any], chosen: Path | None) -> str | None:
    if chosen is not None:
        try:
            return chosen.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the chat template {chosen}: {error}") from error
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    listed = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(listed, list):
        listed = {entry["name"]: entry["template"] for entry in listed}.get("default")
    return listed
