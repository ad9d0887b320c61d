"""POST /v1/chat/completions/batch: several conversations in one request. Each one is answered like a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.chat_planning import plan_with_media
from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.openai.bodies import ChatBatch
from paceline.services.gateway.api.openai.chat_format import ChatFormat
from paceline.services.gateway.api.respond import choose_id, start, whole
from paceline.services.gateway.api.response_format import Json
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.planning.chat_schemas import ChatMessage
from paceline.services.gateway.planning.planning import plan_chats
from paceline.services.gateway.planning.schemas import MAX_CHOICES, ChatRequest

_ABOUT_PROMPT = ("prompt_logprobs", "prompt_token_ids")
"""Fields about one prompt. A chat has them beside its choices, a batch in each choice."""

Conversation = Annotated[list[ChatMessage], Field(min_length=1)]


class ChatBatchRequest(ChatRequest):
    """The body: the fields of a chat, which hold for all conversations, and a list of conversations in `messages`."""

    messages: Annotated[list[Conversation], Field(min_length=1, max_length=MAX_CHOICES)]  # type: ignore[assignment]

    @model_validator(mode="after")
    def _check_batch(self) -> ChatBatchRequest:
        for name, is_wanted in (("stream", self.stream), ("tools", self.tools), ("n", self.n not in (None, 1))):
            if is_wanted:
                message = f"{name} is not supported in a batch; send each conversation to /v1/chat/completions"
                raise ApiError(400, message, param=name)
        return self

    def chats(self) -> list[ChatRequest]:
        """Return one request for each conversation."""
        shared = {name: getattr(self, name) for name in ChatRequest.model_fields}
        # The fields have been checked already.
        return [ChatRequest.model_construct(**{**shared, "messages": messages}) for messages in self.messages]


def add_chat_batch(router: APIRouter, gateway: Gateway) -> None:
    """Add the route POST /v1/chat/completions/batch to a router."""

    @router.post("/v1/chat/completions/batch", response_model=None, responses=answers(ChatBatch))
    async def batch(body: ChatBatchRequest, request: Request) -> Response:
        model = gateway.pick(body.model)
        response_id = choose_id(body.request_id, request)
        chats = body.chats()
        plan = await plan_with_media(model, chats, request, lambda served, media: plan_chats(chats, served, media))
        formats = [ChatFormat(chat, plan, response_id, model.name, model.tokenizer) for chat in chats]
        generation = await start(model, plan, request, is_streamed=False)
        return await whole(generation, request, lambda choices, usage: _join(formats, choices, usage))


def _join(formats: Sequence[ChatFormat], choices: Sequence[Delta], usage: Json) -> Json:
    """Return one chat completion with a choice for each conversation."""
    bodies = [each.whole([choice], usage) for each, choice in zip(formats, choices, strict=True)]
    joined = []
    for body in bodies:
        about_prompt = {name: body.pop(name) for name in _ABOUT_PROMPT}
        joined.append({**body["choices"][0], **about_prompt})
    return {**bodies[0], "choices": joined}
