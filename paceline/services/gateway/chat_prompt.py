"""The text that the model sees for a conversation, with its tools."""

from __future__ import annotations

import json
from typing import Any

from paceline.services.gateway.answers.form import ToolForm
from paceline.services.gateway.answers.registry import AnswerForms
from paceline.services.gateway.schemas import ChatFields
from paceline.services.gateway.tokenizer import Tokenizer

Json = dict[str, Any]


def render_chat(request: ChatFields, tokenizer: Tokenizer, forms: AnswerForms) -> str:
    """Return a conversation as the text that the model sees. Raises InvalidRequestError if the template rejects it."""
    messages = [message.for_template() for message in request.messages]
    tools = [tool.for_template() for tool in request.tools or ()]
    if not forms.template_has_tools and forms.tools is not None:
        messages = _with_tools(messages, tools, forms.tools)
    generation_prompt = request.add_generation_prompt
    return tokenizer.render_chat(
        messages,
        add_generation_prompt=not request.continue_final_message if generation_prompt is None else generation_prompt,
        continue_final_message=request.continue_final_message,
        template_kwargs=_template_kwargs(request),
        tools=tools,
    )


def _template_kwargs(request: ChatFields) -> Json:
    """Return the names for the template: those that switch reasoning, unless the client sets them, and the client's."""
    effort = request.reasoning_effort
    if effort is None:
        return request.chat_template_kwargs or {}
    thinks = effort != "none"
    switches = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    return {**switches, **(request.chat_template_kwargs or {})}


def _with_tools(messages: list[Json], tools: list[Json], form: ToolForm) -> list[Json]:
    """Return messages for a template that knows no tools: these and their calls become text."""
    rewritten = [_with_text(message, form) for message in messages]
    if not tools:
        return rewritten
    system = [message for message in rewritten[:1] if message["role"] in ("system", "developer")]
    texts = [message["content"] for message in system if message["content"]]
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = form.write("NAME", '{"PARAMETER": "VALUE"}')
    texts.append(
        f"You can call these functions:\n<tools>\n{listed}\n</tools>\n"
        f"To call a function, answer with its name and its arguments in this form:\n{example}"
    )
    return [{"role": "system", "content": "\n\n".join(texts)}, *rewritten[len(system) :]]


def _with_text(message: Json, form: ToolForm) -> Json:
    calls = message.get("tool_calls") or ()
    if not calls:
        return message
    written = form.write_all([(call["function"]["name"], str(call["function"]["arguments"])) for call in calls])
    return {**message, "content": f"{message.get('content') or ''}\n{written}".strip("\n")}
