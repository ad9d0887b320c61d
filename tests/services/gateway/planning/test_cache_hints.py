"""What hosts are told about the next use of contexts."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.media import MediaInput, MediaKind
from paceline.services.gateway.planning.cache_hints import (
    MARK_SECONDS,
    OPEN_CALL,
    STORED,
    Mark,
    TextMark,
    hints_after,
    text_marks,
    token_marks,
)
from paceline.services.gateway.planning.chat_prompt import RenderedChat
from paceline.services.gateway.planning.chat_schemas import ChatMessage
from paceline.services.gateway.planning.media.items import Expansion, MediaItem, TokenRun
from paceline.services.gateway.planning.request_body import CacheControl
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.gateway.planning.tool_schemas import ToolDefinition
from tests.services.gateway.conftest import Stack, eventually
from tests.services.gateway.toy_model import BOI, EOI, IMAGE

MARK = CacheControl(type="ephemeral")
HOUR = CacheControl(type="ephemeral", ttl="1h")
TOOL = ToolDefinition.model_validate({"function": {"name": "f"}, "cache_control": {"type": "ephemeral"}})


def message(role: str, content: object, **fields: object) -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": content, **fields})


def test_breakpoints_are_at_the_ends_of_their_texts() -> None:
    text = "<s>rules<u>ok<a>ok<u>ok<a>"
    messages = [
        message("system", "rules", cache_control={"type": "ephemeral", "ttl": "1h"}),
        message("user", "ok"),
        message("assistant", "ok", cache_control={"type": "ephemeral"}),
        message("user", "ok"),
    ]
    ends = {text[: mark.end]: mark.seconds for mark in text_marks(text, messages, [], None)}
    assert ends == {"<s>rules": 3600.0, "<s>rules<u>ok<a>ok": 300.0}


def test_breakpoints_of_parts_tools_and_the_request() -> None:
    text = "<tools>f<u>document\nquestion<a>"
    part = {"type": "text", "text": "document", "cache_control": {"type": "ephemeral"}}
    messages = [message("user", [part, {"type": "text", "text": "question"}])]
    found = [text[: mark.end] for mark in text_marks(text, messages, [TOOL], MARK)]
    assert found == ["<tools>f<u>", "<tools>f<u>document", text]


def test_a_text_that_the_template_has_changed_has_no_place() -> None:
    messages = [message("user", "lost", cache_control={"type": "ephemeral"}), message("user", "there")]
    assert text_marks("<u>LOST<u>there", messages, [], None) == []


def test_each_client_and_reason_is_a_source() -> None:
    mark = Mark(32, MARK_SECONDS["5m"])
    hints = [
        *hints_after([mark], "24h", OPEN_CALL, 100, "me"),
        *hints_after([mark], None, STORED, 100, "you"),
    ]
    assert [(hint.tokens, hint.seconds) for hint in hints] == [
        (32, 300.0),
        (100, 86_400.0),
        (100, 60.0),
        (32, 300.0),
        (100, 900.0),
    ]
    assert hints[0].source == hints[1].source
    assert len({hint.source for hint in hints}) == 4


async def test_hosts_are_told_after_the_request(stack: Stack) -> None:
    host = await stack.add("kvtransfer", "kv", host_id=stack.workers["decode-0"].host_id)
    host.pretends_to_cache = list(range(16))
    await eventually(stack.sees_all)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 60}], "max_tokens": 4}

    async def are_told(seconds: float, **fields: object) -> None:
        """Ask, and wait until the gateway has told the host the right hint, even after the host's first request."""
        answer = await stack.http.post("/v1/chat/completions", json={**chat, **fields})
        assert answer.status_code == 200, answer.text

        async def is_told() -> bool:
            hints = [hint.within_ms / 1000 for told in host.expectations[-1:] for hint in told.hints]
            return hints == [seconds]

        await eventually(is_told)

    await are_told(600.0, prompt_cache_key="k")
    await are_told(86_400.0, prompt_cache_retention="24h")
    await are_told(300.0, cache_control={"type": "ephemeral"})
    later = [{"role": "user", "content": "x" * 60}, {"role": "assistant", "content": "y"}, *chat["messages"]]
    await are_told(900.0, messages=later)
    told = host.expectations[-1]
    assert len(told.hashes) == told.hints[0].tokens // 16 * 16


@pytest.mark.parametrize("rest", ["", "c" * 40])
def test_breakpoints_behind_media_count_their_tokens(media_tokenizer: Tokenizer, rest: str) -> None:
    item, marker = MediaItem("image", "data:,"), "<|image|>"
    own = MediaInput(MediaKind.IMAGE, 30, "uint8", (30, 1, 3), bytes(90))
    media = {item: Expansion((BOI, TokenRun.of(IMAGE, own), EOI))}
    chat = RenderedChat(f"a{marker}b{rest}", ["a", f"b{rest}"], [item], [marker])
    total = len(chat.encode(media, media_tokenizer, False).token_ids)
    marks = [TextMark(1, 300.0), TextMark(len(f"a{marker}b"), 300.0), TextMark(len(chat.text), 300.0)]
    found = token_marks(marks, chat, media, total, media_tokenizer)
    assert [mark.tokens for mark in found] == [1, 1 + 32 + 1, 1 + 32 + 1 + len(rest)]
