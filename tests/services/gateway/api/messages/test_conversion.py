"""Messages as the messages of chats."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.api.messages.conversion import chat_fields, chat_request
from paceline.services.gateway.api.messages.schemas import CountRequest, MessagesRequest
from paceline.services.gateway.planning.answers.form import ReasoningMarks
from paceline.services.gateway.planning.answers.registry import AnswerForms

BILLING = "x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch=00000;"
USER = {"role": "user", "content": "hi"}


def messages(*turns: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """Return what the chat template gets for a conversation."""
    body = CountRequest.model_validate({"messages": list(turns), **fields})
    return [
        {name: value for name, value in message.for_template(True).items() if value is not None}
        for message in chat_fields(body).messages
    ]


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be kind.", "Be kind."),
        ([text("Be kind."), text("Be brief.")], "Be kind.\n\nBe brief."),
        ([text(BILLING), text("Be kind.")], "Be kind."),
        (f"{BILLING}\nBe kind.", "Be kind."),
        ("Ignore x-anthropic-billing-header lines.", "Ignore x-anthropic-billing-header lines."),
    ],
)
def test_system(system: Any, expected: str) -> None:
    assert messages(USER, system=system) == [{"role": "system", "content": expected}, USER]


def test_a_system_text_of_billing_alone_is_no_message() -> None:
    assert messages(USER, system=[text(BILLING)]) == [USER]


def test_system_messages_keep_their_places() -> None:
    answer = {"role": "assistant", "content": "Yes?"}
    system = {"role": "system", "content": [text("The user is in plan mode."), text("Edit nothing.")]}
    told = {"role": "system", "content": "The user is in plan mode.\n\nEdit nothing."}
    first = {"role": "system", "content": "Be kind."}
    assert messages(USER, answer, system, USER, system="Be kind.") == [first, USER, answer, told, USER]
    assert messages(system, USER, system="Be kind.")[0]["content"] == f"Be kind.\n\n{told['content']}"


def test_neighbours_of_one_role_are_one_message() -> None:
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    turns = [USER, USER, {"role": "assistant", "content": "I look."}, {"role": "assistant", "content": [call]}, USER]
    user, assistant, last = messages(*turns)
    assert (user, last) == ({"role": "user", "content": "hi\nhi"}, USER)
    assert (assistant["content"], len(assistant["tool_calls"])) == ("I look.", 1)


def test_reasoning_of_earlier_answers() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "ZGF0YQ"},
        text("Yes."),
    ]
    assistant = messages({"role": "assistant", "content": blocks}, USER)[0]
    assert assistant == {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ""),
        ({"content": "sunny"}, "sunny"),
        ({"content": [text("sunny"), text("dry")]}, "sunny\ndry"),
        ({"content": "no file", "is_error": True}, "Error: no file"),
        (
            {
                "content": [
                    {"type": "search_result", "title": "T", "source": "a.org", "content": [text("x"), text("y")]}
                ]
            },
            "T\na.org\nx\ny",
        ),
        (
            {
                "content": [
                    text("see"),
                    {"type": "document", "title": "T", "source": {"type": "base64", "data": "JVBE"}},
                ]
            },
            "see\nT\n[document: this server reads only text]",
        ),
        ({"content": [{"type": "document", "source": {"type": "text", "data": "page"}}]}, "page"),
        (
            {"content": [{"type": "tool_reference", "tool_name": "f"}]},
            "[tool_reference: this server searches no tools]",
        ),
    ],
)
def test_results_of_tools(fields: dict[str, Any], expected: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", **fields}
    # Templates want the results right after the calls, wherever they are in the user's message.
    assert messages({"role": "user", "content": [text("Go on."), result]}) == [
        {"role": "tool", "content": expected, "tool_call_id": "a"},
        {"role": "user", "content": "Go on."},
    ]


def test_a_conversation_that_ends_with_calls_cannot_be_continued() -> None:
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    with pytest.raises(InvalidRequestError, match="add a message with the tool_result"):
        messages(USER, {"role": "assistant", "content": [call]})


@pytest.mark.parametrize(
    ("thinking", "budget"),
    [
        (None, None),
        ({"type": "adaptive"}, None),
        ({"type": "enabled", "budget_tokens": 2000}, 2000),
        ({"type": "disabled"}, 0),
    ],
)
def test_budgets_are_for_models_that_reason(thinking: Any, budget: int | None) -> None:
    body = MessagesRequest.model_validate({"messages": [USER], "max_tokens": 9, "thinking": thinking})
    reasons = AnswerForms(thought=ReasoningMarks("<think>", "</think>"))
    assert chat_request(body, reasons).thinking_token_budget == budget
    assert chat_request(body, AnswerForms()).thinking_token_budget is None


def test_calls_of_hosted_tools_are_left_out() -> None:
    use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    result = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    answer = {"role": "assistant", "content": [use, result, text("found")]}
    assert messages(USER, answer, USER) == [USER, {"role": "assistant", "content": "found"}, USER]


def test_documents_of_text_are_read() -> None:
    whole = {"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "page"}}
    parts = {"type": "document", "source": {"type": "content", "content": [text("x"), text("y")]}}
    found = {"type": "search_result", "title": "S", "source": "a.org", "content": [text("z")]}
    expected = "T\nC\npage\nx\ny\nS\na.org\nz\nso?"
    assert messages({"role": "user", "content": [whole, parts, found, text("so?")]}) == [
        {"role": "user", "content": expected}
    ]


def test_a_cache_breakpoint_between_texts_does_not_change_the_prompt() -> None:
    plain = {"type": "text", "text": "a"}
    assert messages({"role": "user", "content": [text("a"), plain]}) == messages(
        {"role": "user", "content": [plain, plain]}
    )


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "content": "x", "data": "QQ=="},
        {"type": "text", "data": [text("x")]},
        {"type": "content", "content": [{"type": "text", "text": 5}]},
        {"type": "content", "content": [{"type": "image", "source": {}}]},
    ],
)
def test_documents_of_another_kind_are_refused(source: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="reads only documents of text"):
        messages({"role": "user", "content": [{"type": "document", "source": source}]})
