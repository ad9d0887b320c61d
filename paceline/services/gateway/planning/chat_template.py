"""Chat templates, rendered as in transformers: with the same sandbox, the same options and the same names in scope."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.core.errors import InvalidRequestError, ModelError

Message = Mapping[str, Any]

_OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_REASONING_NAMES = ("reasoning", "reasoning_content", "thinking")
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_FIRST, _SECOND = "zeroth6", "nextafter6"
"""Texts of test messages, which no template contains itself."""
_TOOL: Message = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
_CALL: Message = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
_SYSTEM: Message = {"role": "system", "content": "a"}
_ASKED: Message = {"role": "user", "content": "a"}
_BEFORE: Mapping[str, Sequence[Message]] = {
    "system": (),
    "user": (),
    "assistant": (_ASKED,),
    "tool": (_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]}),
}
"""For each role, the messages that must come before a message of this role in a conversation."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the template's Jinja text.
        special_tokens: names such as `bos_token` and their texts, which the template can use.

    Raises:
        ModelError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid Jinja (line {error.lineno}): {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source
        self._knows_developer = "developer" in source
        self._wants_short_ids = re.search(r"length\s*!=\s*9\b", source) is not None
        """Whether ids of tool calls must have nine characters, as Mistral's templates demand."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        now: datetime.datetime | None = None,
    ) -> str:
        """Return the prompt for a conversation.

        Args:
            messages: the messages, each with a role, content (text) and further fields that the template uses.
            add_generation_prompt: whether the prompt ends with the beginning of the model's answer.
            continue_final_message: whether the prompt ends inside the last message, so that the model continues it.
            template_kwargs: further names that the template can use.
            tools: the functions that the model may call, in the form of a request's `tools`; None if there are none.
            documents: texts that the answer shall use, in the form of a request's `documents`; None if there are none.
            now: local time for the template; None is the present.

        Raises:
            InvalidRequestError: the template refuses the messages, or the arguments contradict each other.
        """
        if not messages:
            raise InvalidRequestError("messages must hold at least one message", "messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; set the latter to false",
                "continue_final_message",
            )
        if taken := sorted(_OWN_NAMES & set(template_kwargs or ())):
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {', '.join(taken)}; use the request's own fields",
                "chat_template_kwargs",
            )
        conversation = [_plain(message) for message in messages]
        for message in conversation:
            # "developer" is OpenAI's newer name for "system". Templates without it drop or misread the message.
            if message.get("role") == "developer" and not self._knows_developer:
                message["role"] = "system"
            if self._wants_short_ids:
                _shorten_ids(message)
        given = {
            **({"strftime_now": now.strftime} if now is not None else {}),
            **(template_kwargs or {}),
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": [dict(document) for document in documents] if documents else None,
        }
        render = self._render_open_end if continue_final_message else self._render
        try:
            return render(conversation, add_generation_prompt, given)
        except InvalidRequestError:
            merged = _with_one_system_message(conversation)
            if merged is None:
                raise
        return render(merged, add_generation_prompt, given)

    def two_turns(self, template_kwargs: Mapping[str, Any]) -> tuple[str, str]:
        """Return the prompt of a conversation's first turn, and the prompt of its second turn.

        Templates of models that reason often begin the answer with a mark such as <think>, and drop the mark together
        with the reasoning as soon as the answer belongs to an earlier turn. Then the two prompts differ from the
        beginning of the answer on. Returns the first prompt twice if they differ before.

        Raises InvalidRequestError if the template refuses such a conversation.
        """
        asked, now = [_plain(_ASKED)], datetime.datetime.now()
        given = {"tools": None, "strftime_now": now.strftime, **template_kwargs}
        later = [*asked, _plain({"role": "assistant", "content": _FIRST}), _plain({"role": "user", "content": _SECOND})]
        question, prompt = self._render(asked, False, given), self._render(asked, True, given)
        next_prompt = self._render(later, True, given)
        has_question = prompt.startswith(question) and next_prompt.startswith(question)
        return prompt, next_prompt if has_question else prompt

    @cached_property
    def roles_with_parts(self) -> frozenset[str]:
        """The roles for which the template reads a list of texts as content.

        For all other roles, the template fails, or writes the list itself into the prompt, as Python or JSON would.
        """
        return frozenset(role for role in _BEFORE if self._reads_parts(role))

    def _reads_parts(self, role: str) -> bool:
        """Return whether the template reads a list of texts whenever it reads a text for this role.

        Both are tried with and without tools and a system message.
        """
        parts = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]
        readings = []
        for tools, system in itertools.product((None, [_TOOL]), ([], [_SYSTEM] if role != "system" else [])):

            def render(content: object, tools: object = tools, system: Sequence[Message] = system) -> str:
                result = {"tool_call_id": _CALL["id"], "name": "f"} if role == "tool" else {}
                asked = [] if role == "user" else [_ASKED]
                probe = [*system, *_BEFORE[role], {"role": role, "content": content, **result}, *asked]
                try:
                    return self._render([_plain(message) for message in probe], True, {"tools": tools})
                except InvalidRequestError:
                    return ""

            if _FIRST in render(_FIRST):
                rendered = render(parts)
                # A list that is written as it is has "text': 'zeroth6".
                is_written = re.search(rf"text\W+{_FIRST}", rendered) is not None
                readings.append(_FIRST in rendered and _SECOND in rendered and not is_written)
        return bool(readings) and all(readings)

    def _render(self, conversation: list[dict[str, Any]], generation_prompt: bool, given: Mapping[str, Any]) -> str:
        names = {
            "strftime_now": datetime.datetime.now().strftime,
            **self._special_tokens,
            "documents": None,
            **given,
            "messages": conversation,
            "add_generation_prompt": generation_prompt,
        }
        try:
            return self._template.render(names)
        except Exception as error:  # a template is a program that may raise anything, and these messages caused it
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error

    def _render_open_end(
        self, conversation: list[dict[str, Any]], generation_prompt: bool, given: Mapping[str, Any]
    ) -> str:
        conversation = [*conversation[:-1], dict(conversation[-1])]
        content = conversation[-1].get("content")
        parts = content if isinstance(content, list) and content else [{"text": content}]
        text = parts[-1].get("text")
        if not isinstance(text, str):
            raise InvalidRequestError("continue_final_message needs a last message that ends with text", "messages")
        marked = text + _END_MARK
        is_list = isinstance(content, list)
        conversation[-1]["content"] = [*parts[:-1], {**parts[-1], "text": marked}] if is_list else marked
        rendered = self._render(conversation, generation_prompt, given)
        mark = _END_MARK.strip()
        if mark not in rendered or text.strip() not in rendered:
            raise InvalidRequestError(
                "the model's chat template changes the last message, so that it cannot be continued",
                "continue_final_message",
            )
        end = rendered.rindex(mark)
        # The mark ends in a space. If it is gone, the template trims content, so space before the mark goes as well.
        return rendered[:end] if rendered.startswith(_END_MARK, end) else rendered[:end].rstrip()


def _shorten_ids(message: dict[str, Any]) -> None:
    """Replace the ids of a message's tool calls by ids of nine letters and digits. Equal ids stay equal."""

    def short(call_id: object) -> str:
        text = str(call_id)
        fits = len(text) == 9 and text.isascii() and text.isalnum()
        return text if fits else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]

    if "tool_calls" in message:
        message["tool_calls"] = [{**call, "id": short(call.get("id"))} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        message["tool_call_id"] = short(message["tool_call_id"])


def _text(content: object) -> str:
    """Return a message's content as one text, its parts joined by newlines; "" if it has no text."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return content if isinstance(content, str) else ""


def _with_one_system_message(conversation: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the conversation with all system messages joined into one at its beginning.

    Some templates refuse later system messages. Returns None if there is nothing to join: no system message, or only
    the first message.
    """
    texts = [_text(message.get("content")) for message in conversation if message.get("role") == "system"]
    others = [message for message in conversation if message.get("role") != "system"]
    if not texts or (len(texts) == 1 and conversation[0].get("role") == "system"):
        return None
    joined = "\n\n".join(filter(None, texts))
    return [{"role": "system", "content": joined}, *others]


class _GenerationBlock(Extension):
    """Jinja's tag `{% generation %}`: it marks the model's text for training, and rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _plain(message: Message) -> dict[str, Any]:
    # Many templates only test whether a key is present, and would print "None" for a key without a value. All of them
    # take the key "content" for granted.
    present = {key: value for key, value in message.items() if value is not None}
    present.setdefault("content", "")
    reasoning = next((present[name] for name in _REASONING_NAMES if name in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, and a prompt must not be escaped.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
