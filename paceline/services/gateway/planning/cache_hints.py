"""Hints about the next use of a context, from the fields of its request and the end of its answer. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from paceline.core.cache_policy.hints import Hint
from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.planning.chat_prompt import RenderedChat, encode_prompt
from paceline.services.gateway.planning.chat_schemas import ChatMessage, TextPart
from paceline.services.gateway.planning.media.items import Expansions
from paceline.services.gateway.planning.request_body import CacheControl
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.gateway.planning.tool_schemas import CustomToolDefinition, ToolDefinition

MOST_MARKS = 4
"""Largest number of cache breakpoints of a request, as in Anthropic's API."""

MARK_SECONDS = {"5m": 300.0, "1h": 3600.0}
"""Lifetimes of cache breakpoints in seconds, by the value of `ttl`."""
RETENTION_SECONDS = {"in_memory": 600.0, "in-memory": 600.0, "24h": 86_400.0}
"""Seconds for which a client expects a prompt to be cached, by `prompt_cache_retention`. OpenAI keeps prompts in memory
for 5 to 10 minutes."""

_SOURCE_BYTES = 8
_MOST_MISSES = 64
"""Largest number of searches of the whole prompt for a message's text that fail. Later texts count as missing."""


class Mark(NamedTuple):
    """A cache breakpoint: the client expects to send the prompt's first `tokens` tokens again."""

    tokens: int
    seconds: float


class Learnt(NamedTuple):
    """The gateway's own expectation that a later prompt begins with the whole context, the answer included."""

    reason: str
    seconds: float


OPEN_CALL = Learnt("the answer calls a tool", 60.0)
STORED = Learnt("the response is stored", 900.0)
LATER_TURN = Learnt("the conversation has gone on before", 900.0)


class TextMark(NamedTuple):
    """A cache breakpoint in the text of a conversation."""

    end: int
    """Index of the first character after the breakpoint."""
    seconds: float


def text_marks(
    text: str,
    messages: Sequence[ChatMessage],
    tools: Iterable[ToolDefinition | CustomToolDefinition],
    whole: CacheControl | None,
) -> list[TextMark]:
    """Return the cache breakpoints of a conversation. A breakpoint that is not found in `text` is left out.

    Args:
        text: the conversation as the chat template writes it.
        whole: the breakpoint of the request itself, which is at the end of the prompt.

    Raises InvalidRequestError if there are more than MOST_MARKS breakpoints.
    """
    marks = [tool.cache_control for tool in tools if tool.cache_control is not None]
    places = [(index, own, mark) for index, message in enumerate(messages) for own, mark in _pieces(message)]
    asked = [*marks, *(mark for _, _, mark in places if mark is not None), *([whole] if whole is not None else [])]
    if not asked:
        return []
    if len(asked) > MOST_MARKS:
        message = f"a request may have cache_control at {MOST_MARKS} places, not {len(asked)}; mark the last ones"
        raise InvalidRequestError(message, "cache_control")
    found: list[TextMark] = []
    position = misses = 0
    for number, (index, own, mark) in enumerate(places, 1):
        start = -1
        for written in dict.fromkeys((own, own.strip())):  # Many templates strip texts.
            if start < 0 and misses < _MOST_MISSES:
                own, start = written, text.find(written, position)
                misses += start < 0
        if start >= 0:
            if marks and messages[index].role not in ("system", "developer"):
                # Templates write tools within the system prompt or next to it.
                found += [TextMark(start, MARK_SECONDS[tool.ttl]) for tool in marks]
                marks = []
            position = start + len(own)
        is_last = number == len(places)
        if mark is not None and (start >= 0 or is_last):
            found.append(TextMark(len(text) if is_last else position, MARK_SECONDS[mark.ttl]))
    if whole is not None:
        found.append(TextMark(len(text), MARK_SECONDS[whole.ttl]))
    return found


def token_marks(
    marks: Iterable[TextMark], chat: RenderedChat, media: Expansions, prompt_tokens: int, tokenizer: Tokenizer
) -> tuple[Mark, ...]:
    """Return the breakpoints with their places in tokens, which may be wrong by a few tokens.

    For each breakpoint, the shorter of the texts before and after it is tokenized again.

    Args:
        media: the tokens that stand in the prompt for each item.
        prompt_tokens: number of tokens of the whole prompt.
    """
    length = len(chat.text)

    def count(start: int, end: int) -> int:
        return len(encode_prompt(chat.pieces(media, start, end), tokenizer, False, "messages").token_ids)

    def tokens_before(end: int) -> int:
        if end >= length:
            return prompt_tokens
        return count(0, end) if 2 * end <= length else max(0, prompt_tokens - count(end, length))

    return tuple(Mark(tokens_before(mark.end), mark.seconds) for mark in marks)


def hints_after(
    marks: Iterable[Mark], retention: str | None, learnt: Learnt | None, context_tokens: int, owner: str
) -> list[Hint]:
    """Return the hints about a context whose request has ended.

    Args:
        marks: the client's cache breakpoints.
        retention: the client's `prompt_cache_retention`; None if the request has none.
        learnt: the gateway's own expectation; None if there is none.
        context_tokens: number of tokens of the prompt and the answer together.
        owner: digest of the client's key. How often hints come true is counted for each client.
    """
    asked = _source(owner, "asked")
    hints = [Hint(mark.tokens, mark.seconds, asked) for mark in marks]
    if retention is not None:
        hints.append(Hint(context_tokens, RETENTION_SECONDS[retention], asked))
    if learnt is not None:
        hints.append(Hint(context_tokens, learnt.seconds, _source(owner, learnt.reason)))
    return hints


def _pieces(message: ChatMessage) -> Iterator[tuple[str, CacheControl | None]]:
    """Yield the texts of a message, each with the cache breakpoint at its end; None if it has none."""
    parts = message.content if isinstance(message.content, list) else []
    texts = [part for part in parts if isinstance(part, TextPart)]
    for part in texts[:-1]:
        yield part.text, part.cache_control
    last = texts[-1].text if texts else message.content if isinstance(message.content, str) else ""
    own = texts[-1].cache_control if texts else None
    yield last, own or message.cache_control


def _source(owner: str, reason: str) -> bytes:
    return hashlib.sha256(f"{reason} {owner}".encode()).digest()[:_SOURCE_BYTES]
