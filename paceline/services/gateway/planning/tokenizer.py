"""A model's tokenizer, its chat template and its sampling defaults."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import tokenizers

from paceline.core.config import GenerationConfig
from paceline.core.end_tokens import end_token_ids, special_tokens, text_value
from paceline.core.errors import ConfigError, InvalidRequestError, ModelError
from paceline.core.machine import yield_to_others
from paceline.core.model_folder import read_model_files, read_object
from paceline.services.gateway.http.errors import NOT_UNICODE
from paceline.services.gateway.planning.chat_template import ChatTemplate, Message
from paceline.services.gateway.planning.media.items import NO_MEDIA, ItemKind, MediaTokens
from paceline.services.gateway.planning.media.marks import MediaMarks, ReservedTokens
from paceline.services.gateway.planning.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters for requests that leave them out: the model's own, or else OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 0
    """Longest answer to a chat, in tokens; 0 if only the context limits answers."""

    @staticmethod
    def from_generation_config(values: Mapping[str, Any]) -> SamplingDefaults:
        """Return the defaults of a model with these values in its generation_config.json.

        Raises ModelError if a value is outside the range that requests accept.
        """
        known = {name: values[name] for name in SamplingDefaults.__slots__ if values.get(name) is not None}
        for name, value in known.items():
            (least, most), kind = _RANGES[name], "a whole number" if name in _WHOLE else "a number"
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
            if not is_number or (name in _WHOLE and value != int(value)):
                raise ModelError(
                    f"generation_config.json: {name} must be {kind} from {least:g} to {most:g}, not {value!r}; "
                    "correct it, or start with --generation-config none"
                )
        return SamplingDefaults(**{name: int(value) if name in _WHOLE else value for name, value in known.items()})


_RANGES = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "max_new_tokens": (1, 2**31),
}
"""Smallest and largest value that requests accept for each parameter."""
_WHOLE = ("top_k", "max_new_tokens")

LEAST_CHARACTERS, CONTEXT_CHARACTERS = 1 << 20, 8
"""Characters of the longest text: the larger of a fixed number, and a number for each token of the context."""
LONG_TEXTS = 2
"""Number of threads that tokenize long texts."""
LONG_CHARACTERS = 64 << 10
"""Number of characters from which a text is long. Tokenizing so many takes some hundredths of a second."""

_QUOTED = re.compile(r"""["'](?=([^"'\n]+)["'])""")
"""Finds each text between two quotes that contains no quote itself."""

_DEFAULT, _TOOL_USE = "default", "tool_use"
"""Transformers' names of a model's two chat templates: the one for conversations with tools is `_TOOL_USE`."""

_SWITCHES_KEPT = 64
"""Number of settings of chat templates, such as `enable_thinking`, whose dropped ends of prompts are remembered."""
_LONGEST_SWITCHES = 1000
"""Largest number of characters of settings that are remembered. Longer ones are texts and would take much memory."""


class Tokenizer:
    """A model's tokenizer: text to token ids and back, and the chat template.

    Args:
        folder: must have tokenizer.json; tokenizer_config.json, generation_config.json and config.json are optional.
        chat_template: a file that replaces the model's own template.
        generation_config: "none" ignores the sampling parameters in generation_config.json.
        media_tokens: the tokens that belong to media. No text is tokenized to such a token.
        max_characters: length of the longest text that `encode` takes; 0 derives it from the model's context.
        generates: whether the model generates tokens.

    Raises:
        ModelError: the folder does not hold a tokenizer that can be read, or the tokenizer lacks a token of media.
        ConfigError: `chat_template` cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        chat_template: Path | None = None,
        generation_config: GenerationConfig = "auto",
        media_tokens: MediaTokens = NO_MEDIA,
        max_characters: int = 0,
        generates: bool = True,
    ) -> None:
        path = folder / "tokenizer.json"
        self._long_texts = ThreadPoolExecutor(LONG_TEXTS, "tokenize", initializer=yield_to_others)
        """Threads that tokenize long texts. Their priority is low, because no stream waits for them."""
        self.files = read_model_files(folder)
        """The model's config and tokenizer files, which must be equal at all workers."""
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json; MODEL must be the model's Hugging Face folder")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"cannot read {path}: {error}") from error
        settings = read_object(folder / "tokenizer_config.json")
        generation = read_object(folder / "generation_config.json")
        model = read_object(folder / "config.json")
        special = special_tokens(folder, settings)

        self.vocabulary = Vocabulary(self._tokenizer, generates)
        size = text_value(model, "vocab_size") or self._tokenizer.get_vocab_size()
        if not isinstance(size, int):
            raise ModelError(f"{folder / 'config.json'}: vocab_size must be a positive whole number, not {size!r:.80}")
        self.vocab_size = size
        """Number of logits of the model. Every token id is lower."""
        context = text_value(model, "max_position_embeddings")
        by_context = CONTEXT_CHARACTERS * (context if isinstance(context, int) else 0)
        self._max_characters = max_characters or max(LEAST_CHARACTERS, by_context)
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        """Upper bound of the number of characters that one token stands for."""
        own_end = self._tokenizer.token_to_id(special.get("eos_token", ""))
        self.eos_token_ids = end_token_ids(generation, model, own_end, size)
        self.defaults = SamplingDefaults.from_generation_config(generation if generation_config == "auto" else {})
        self.reserved_ids = media_tokens.reserved
        """Ids of tokens that belong to media."""
        self.media_kinds: frozenset[ItemKind] = frozenset(media_tokens.markers)
        """The kinds of media that the model takes."""
        self.reserved_texts: Mapping[int, str] = {}
        """Texts that `encode` turns into the tokens of media, by id. No client can guess them."""
        self._encoder = self._tokenizer
        if media_tokens.reserved:
            reserved = ReservedTokens(path, {own: self._text_of(own, folder) for own in media_tokens.reserved})
            self._encoder, self.reserved_texts = reserved.tokenizer, reserved.texts
        # Truncation and padding are for training. A prompt is never truncated or padded silently.
        self._encoder.no_truncation()
        self._encoder.no_padding()
        markers = media_tokens.markers.items()
        self.marks = MediaMarks({kind: "".join(self._text_of(own, folder) for own in ids) for kind, ids in markers})
        self.settings = settings
        """The content of tokenizer_config.json."""
        self._special_tokens = special
        sources = _chat_templates(folder, settings, chat_template)
        self.chat_template_source = sources.get(_DEFAULT, "")
        """The Jinja text of the chat template for conversations without tools; "" if there is none."""
        self.tool_template_source = sources.get(_TOOL_USE, self.chat_template_source)
        """The Jinja text of the chat template for conversations with tools; usually the same text."""
        self._chat_templates = {
            name: ChatTemplate(self.marks.hide_markers(source), special) for name, source in sources.items()
        }
        self._quoted_names = lru_cache(len(sources) or 1)(lambda source: frozenset(_QUOTED.findall(source)))
        self._dropped_ends = lru_cache(_SWITCHES_KEPT)(self._find_dropped_end)
        if read_model_files(folder) != self.files:
            raise ModelError(f"{folder} changed while it was read; start again when it is complete")

    def prepare(self) -> None:
        """Make tables, and find dropped ends of prompts, so that the first request does not have to wait for them."""
        self.vocabulary.prepare()
        for has_tools in (False, True):
            self.dropped_end({}, has_tools)

    def encode(self, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Return a text's token ids. Raises InvalidRequestError, which names `param`, if the text is not valid Unicode
        or too long: while a text is tokenized, each token takes a hundred bytes.

        A text that spells a reserved token becomes other tokens of the same text.
        """
        (encoded,) = self.encode_batch([(text, param)], add_special_tokens)
        return list(encoded.ids)

    def encode_batch(
        self, texts: Sequence[tuple[str | tuple[str, str], str]], add_special_tokens: bool
    ) -> list[tokenizers.Encoding]:
        """Return the tokens of texts and pairs of texts. Raises the errors of `encode`.

        Args:
            texts: each text or pair, and the field that has it, which errors name.
        """
        total = 0
        for text, param in texts:
            length = len(text) if isinstance(text, str) else len(text[0]) + len(text[1])
            total += length
            if length > self._max_characters:
                most = f"{self._max_characters} at once (--max-text-characters)"
                raise InvalidRequestError(f"{param}: the text has {length} characters; this server reads {most}", param)
        given = [text for text, _ in texts]
        # Unlike `encode` of the library, the batch form lets other Python threads run.
        encode = partial(self._encoder.encode_batch_fast, given, add_special_tokens=add_special_tokens)
        try:
            return encode() if total < LONG_CHARACTERS else self._long_texts.submit(encode).result()
        except (UnicodeEncodeError, TypeError) as error:
            param = next((param for text, param in texts if not _is_unicode(text)), texts[0][1])
            raise InvalidRequestError(f"{param}: the text is {NOT_UNICODE}", param) from error

    def offsets(self, text: str, add_special_tokens: bool) -> list[tuple[int, int]]:
        """Return the characters (begin, end) of each token of a text; (0, 0) for tokens without text.

        The text must be one that `encode` accepts.
        """
        (encoded,) = self._encoder.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoded.offsets)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

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
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: datetime.datetime | None = None,
    ) -> str:
        """Return a conversation's text from `ChatTemplate.render`, with texts of `marks` at the places of media.

        Raises InvalidRequestError if the model has no template.
        """
        template = self._chat_template(bool(tools))
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template (it is a base model); use /v1/completions, "
                "or start the gateway with --chat-template FILE",
                "messages",
            )
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=tools,
            documents=documents,
            now=now,
        )

    def dropped_end(self, template_kwargs: Mapping[str, Any], has_tools: bool) -> list[int]:
        """Return the tokens at the end of a conversation's prompt that the prompts of later turns do not repeat.

        The chat template drops these tokens; see `ChatTemplate.two_turns`. For most templates there are none.

        Args:
            template_kwargs: further names that the template can use, with values of JSON.
        """
        switches = json.dumps(template_kwargs, sort_keys=True)
        return self._dropped_ends(switches, has_tools) if len(switches) <= _LONGEST_SWITCHES else []

    def _find_dropped_end(self, template_kwargs: str, has_tools: bool) -> list[int]:
        template = self._chat_template(has_tools)
        if template is None:
            return []
        try:
            prompts = template.two_turns(json.loads(template_kwargs))
        except InvalidRequestError:
            return []
        first, later = (self.encode(prompt, add_special_tokens=False) for prompt in prompts)
        common = next((place for place, pair in enumerate(zip(first, later)) if pair[0] != pair[1]), len(first))
        return first[common:]

    def roles_with_parts(self, has_tools: bool) -> frozenset[str]:
        """Return the roles whose messages may have a list of texts as content; no roles without a chat template.

        Args:
            has_tools: whether the conversation has tools.
        """
        template = self._chat_template(has_tools)
        return frozenset() if template is None else template.roles_with_parts

    def _chat_template(self, has_tools: bool) -> ChatTemplate | None:
        name = _TOOL_USE if has_tools and _TOOL_USE in self._chat_templates else _DEFAULT
        return self._chat_templates.get(name)

    def names_documents(self, has_tools: bool) -> bool:
        """Return whether the chat template (for conversations with or without tools) shows documents."""
        return "documents" in self._source(has_tools)

    def names_fields(self, fields: Iterable[str], has_tools: bool) -> bool:
        """Return whether the chat template has the name of one of these fields in quotes, and so reads the field."""
        return not self._quoted_names(self._source(has_tools)).isdisjoint(fields)

    def _source(self, has_tools: bool) -> str:
        return self.tool_template_source if has_tools else self.chat_template_source

    def template(self, source: str) -> ChatTemplate:
        """Return a template from Jinja text, with the model's special tokens. Raises the errors of ChatTemplate."""
        return ChatTemplate(source, self._special_tokens)

    def _text_of(self, token_id: int, folder: Path) -> str:
        """Return the text of a token of media. Raises ModelError if the tokenizer lacks the token."""
        text = self.token_string(token_id)
        if len(text) < 2:
            raise ModelError(
                f"{folder}: config.json gives media the token {token_id}, which tokenizer.json does not have"
            )
        return text


def _is_unicode(text: str | tuple[str, str]) -> bool:
    """Return whether a text, or both texts of a pair, can be written in UTF-8."""
    try:
        "".join(text).encode()
    except UnicodeEncodeError:
        return False
    return True


def _chat_templates(folder: Path, settings: Mapping[str, Any], chosen: Path | None) -> dict[str, str]:
    """Return the Jinja texts of the templates that a conversation can have, by name.

    As in transformers, a file of its own replaces the template of the same name in tokenizer_config.json.
    """
    if chosen is not None:
        try:
            return {_DEFAULT: chosen.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the chat template {chosen}: {error}") from error
    listed = settings.get("chat_template") or read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(listed, list):
        found = {str(entry["name"]): str(entry["template"]) for entry in listed}
    else:
        found = dict(listed) if isinstance(listed, dict) else {_DEFAULT: str(listed)} if listed else {}
    for file in (folder / "chat_template.jinja", folder / "additional_chat_templates" / f"{_TOOL_USE}.jinja"):
        if file.is_file():
            found[_TOOL_USE if file.stem == _TOOL_USE else _DEFAULT] = file.read_text(encoding="utf-8")
    return {name: found[name] for name in (_DEFAULT, _TOOL_USE) if name in found}
