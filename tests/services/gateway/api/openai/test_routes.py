"""POST /v1/chat/completions/batch."""

from __future__ import annotations

from typing import Any

from tests.services.gateway.conftest import Stack
from tests.services.gateway.toy_workers import TEXT

PATH = "/v1/chat/completions/batch"
HELLO = [{"role": "user", "content": "hello"}]
LONGER = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "?"},
]


async def test_each_conversation_gets_a_choice(stack: Stack) -> None:
    answer = (await stack.post(PATH, messages=[HELLO, LONGER], max_tokens=5, seed=0, return_token_ids=True)).json()
    assert (answer["object"], answer["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice, prompt in zip(
        answer["choices"], ([257, *b"hello", 258], [257, *b"hello", 258, *b"hi", 257, *b"?", 258])
    ):
        assert choice["prompt_token_ids"] == prompt
        assert choice["message"]["content"] in TEXT
        assert (len(choice["message"]["content"]), choice["finish_reason"]) == (5, "length")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7 + 12, 10, 29)
    assert "prompt_token_ids" not in answer


async def test_what_a_conversation_continues_is_its_own(stack: Stack) -> None:
    conversations = [[*HELLO, {"role": "assistant", "content": text}] for text in ("One", "Two")]
    body = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    answer = (await stack.post(PATH, messages=conversations, max_tokens=2, **body)).json()
    assert [choice["message"]["content"][:3] for choice in answer["choices"]] == ["One", "Two"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "stream"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"n": 2}, "n"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"messages": []}, "messages"),
    ({"messages": [HELLO, []]}, "messages[1]"),
    ({"messages": HELLO}, "messages[0]"),
    ({"messages": [HELLO, [{"role": "user", "content": "a" * 600}]]}, "messages[1]"),
    ({"messages": [[{"role": "user", "content": 5}]]}, "messages[0][0].content"),
]


async def test_refusals(stack: Stack) -> None:
    for fields, param in REFUSED:
        answer = await stack.post(PATH, **{"messages": [HELLO], **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert stack.workers["decode-0"].calls == []
