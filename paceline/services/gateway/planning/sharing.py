"""Salts of cached blocks: requests of different owners share no blocks, unless the operator allows sharing.

A client that finds a cached block learns that another request has had the same tokens. So each request gets a salt,
which is part of the names of its blocks. The operator can let keys share blocks, and can name beginnings of prompts,
such as system prompts, whose blocks all owners share:

[support]
text = "You are the assistant of …"

[review]
file = "review.txt"
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.kv_layout import BASE_TOKENS
from paceline.core.toml_tables import read_entry
from paceline.services.common.secret import Secret
from paceline.services.gateway.http.access.callers import Caller
from paceline.services.gateway.planning.answers.registry import AnswerForms
from paceline.services.gateway.planning.chat_prompt import render_chat
from paceline.services.gateway.planning.chat_schemas import ChatMessage
from paceline.services.gateway.planning.media.items import NO_ITEMS
from paceline.services.gateway.planning.schemas import ChatFields
from paceline.services.gateway.planning.tokenizer import Tokenizer

_SALT_BYTES = 16
_LENGTH_BYTES = 8
_DAYS = 3
"""Days whose tokenized beginnings are kept. Templates write the date, and a stream may go on after midnight."""
_ADVICE = "docs/operations/security.md shows how to write it"

NO_FORMS = AnswerForms()

log = logging.getLogger(__name__)


class CacheSalts:
    """Derives the salt of a request's blocks from the caller and the `cache_salt` that the client has chosen.

    All gateways of a cluster derive the same salts, also after a restart. No client can choose the salt of another
    domain. Someone who sees the names of blocks but not the cluster's secret cannot guess prompts from the names.

    Args:
        secret: the cluster's secret.
        shares_all: whether all callers share blocks with each other.
    """

    def __init__(self, secret: Secret, shares_all: bool = False) -> None:
        self._key = secret.key("paceline salts of cached blocks")
        self._shares_all = shares_all

    def salt(self, caller: Caller, wanted: str) -> str:
        """Return the salt of a request, which is never "".

        Args:
            wanted: the salt that the client has chosen; "" if it has chosen none.
        """
        texts = (*self._domain(caller), wanted)
        parts = [text.encode("utf-8", "surrogatepass") for text in texts]
        # With their lengths, so that no byte can move from one part to another.
        data = b"".join(len(part).to_bytes(_LENGTH_BYTES) + part for part in parts)
        return hashlib.blake2b(data, digest_size=_SALT_BYTES, key=self._key).hexdigest()

    def _domain(self, caller: Caller) -> tuple[str, str]:
        """Return the kind and the name of the domain of a caller. Callers of one domain share blocks."""
        if self._shares_all:
            return "all", ""
        return ("group", caller.share_cache) if caller.share_cache else ("owner", caller.owner)


class SharedPrompts:
    """Beginnings of prompts that the operator has named, and whose blocks all owners share.

    A text is shared as the beginning of a prompt, and as the system message at the beginning of a chat without tools.
    For a chat, the shared tokens end where the chat template has written the text. They come from the operator's text,
    the template and the date alone, so nothing of a client is shared.

    Args:
        texts: the texts by their names.
        tokenizer: the model's tokenizer.
        forms: how the model writes reasoning and tool calls.
    """

    def __init__(self, texts: Mapping[str, str], tokenizer: Tokenizer, forms: AnswerForms = NO_FORMS) -> None:
        self._texts, self._tokenizer, self._forms = list(texts.values()), tokenizer, forms
        self._by_day: dict[datetime.date, list[list[int]]] = {}
        for name, text in texts.items():
            alone, in_chats = self._beginnings_of(text, datetime.datetime.now())
            if not alone:
                log.warning("--shared-prompts: nothing of [%s] is shared: it has too few tokens for a block", name)
            elif not in_chats and tokenizer.chat_template_source:
                log.warning("--shared-prompts: chats do not share [%s]: the chat template changes or refuses it", name)

    def shared_tokens(self, token_ids: Sequence[int], now: datetime.datetime | None = None) -> int:
        """Return the number of tokens at the front of a prompt whose blocks are shared, a multiple of BASE_TOKENS.

        Args:
            now: local time that the chat template has seen; None is the present.
        """
        if not self._texts:
            return 0
        found = self._beginnings(now or datetime.datetime.now())
        return max((len(own) for own in found if list(token_ids[: len(own)]) == own), default=0)

    def _beginnings(self, now: datetime.datetime) -> list[list[int]]:
        day = now.date()
        if (found := self._by_day.get(day)) is None:
            found = [own for text in self._texts for own in self._beginnings_of(text, now) if own]
            self._by_day = {**dict(list(self._by_day.items())[1 - _DAYS :]), day: found}
        return found

    def _beginnings_of(self, text: str, now: datetime.datetime) -> tuple[list[int], list[int]]:
        """Return the shared tokens of prompts that begin with a text, and of chats whose system message it is.

        Both have a multiple of BASE_TOKENS tokens.
        """
        # The last token may be another one if the prompt goes on.
        alone, in_chats = self._tokenizer.encode(text, True)[:-1], self._in_chats(text, now)
        return alone[: _whole(alone)], in_chats[: _whole(in_chats)]

    def _in_chats(self, text: str, now: datetime.datetime) -> list[int]:
        """Return the tokens of a chat that end before the end of its system message; [] if it cannot have one."""
        tokenizer = self._tokenizer
        messages = [ChatMessage(role="system", content=text), ChatMessage(role="user", content="x")]
        try:
            rendered = render_chat(ChatFields(messages=messages), tokenizer, self._forms, now)
        except InvalidRequestError:
            return []  # the model has no template, or one without system messages
        token_ids = rendered.encode(NO_ITEMS, tokenizer, False).token_ids
        offsets = tokenizer.offsets(rendered.text, False)
        written = text.strip()  # many templates strip texts
        start = rendered.text.find(written)
        if start < 0 or len(offsets) != len(token_ids):
            return []
        last = start + len(written)
        return token_ids[: next((place for place, (_, end) in enumerate(offsets) if end >= last), 0)]


def _whole(token_ids: Sequence[int]) -> int:
    """Return the number of tokens, rounded down to a multiple of BASE_TOKENS."""
    return len(token_ids) // BASE_TOKENS * BASE_TOKENS


class _Entry(BaseModel):
    """One table of the file --shared-prompts: a text, or the path of a file with the text."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    text: Annotated[str, Field(min_length=1)] | None = None
    file: Annotated[str, Field(min_length=1)] | None = None


def read_shared_prompts(file: str) -> dict[str, str]:
    """Read the texts of `--shared-prompts`. Return them by name, without white space at their ends.

    Args:
        file: path of the option; "" if there is no file.

    Raises ConfigError if a file cannot be read or is not valid.
    """
    if not file:
        return {}
    where = f"--shared-prompts {file}"
    try:
        tables = tomllib.loads(_read(Path(file), where))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}; {_ADVICE}") from None
    texts = {}
    for name, table in tables.items():
        entry = read_entry(_Entry, where, name, table, "prompt", _ADVICE)
        if (entry.text is None) == (entry.file is None):
            raise ConfigError(f"{where}: [{name}] needs either text or file; {_ADVICE}")
        text = entry.text if entry.text is not None else _read(Path(file).parent / (entry.file or ""), where)
        texts[name] = text.rstrip()
    if empty := [name for name, text in texts.items() if not text]:
        raise ConfigError(f"{where}: [{empty[0]}] has no text; {_ADVICE}")
    return texts


def _read(path: Path, where: str) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error}; {_ADVICE}") from None
