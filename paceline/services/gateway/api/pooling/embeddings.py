"""Embeddings with the route of OpenAI and the further fields of vLLM."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.chat_planning import encode_conversation
from paceline.services.gateway.api.pooling.bodies import Embeddings
from paceline.services.gateway.api.pooling.encoding import EncodingFields, respond
from paceline.services.gateway.api.pooling.inputs import (
    InputFields,
    check_count,
    choose_model,
    prompt_named,
    text_inputs,
)
from paceline.services.gateway.api.pooling.pool import pool
from paceline.services.gateway.api.respond import choose_id
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.chat_schemas import ChatMessage
from paceline.services.gateway.planning.pooling import TextInput
from paceline.services.gateway.planning.schemas import ChatFields, TokenId

Conversation = Annotated[list[ChatMessage], Field(min_length=1)]


class EmbeddingRequest(InputFields, EncodingFields):
    """The body of POST /v1/embeddings: `input`, or conversations in `messages` for models with a chat template."""

    input: str | list[str] | list[TokenId] | list[list[TokenId]] | None = None  # type: ignore[assignment]
    messages: Conversation | list[Conversation] | None = None
    """A conversation, or several. Each becomes one embedding of its text by the model's chat template."""
    dimensions: int | None = Field(None, ge=1)
    """Length to which embeddings are cut before they get the length 1. Default: the model's own."""
    prompt_name: str | None = None
    """Name of the model's prompt that stands before each text. Default: the model's default prompt, if it has one."""
    use_activation: bool | None = None
    """Whether embeddings get the length 1. Default: as the checkpoint says."""
    add_special_tokens: bool | None = None  # type: ignore[assignment]
    """Whether the tokenizer adds its special tokens to texts. Default: to `input`, and not to `messages`."""
    add_generation_prompt: bool = False
    """Whether the text of a conversation ends with the beginning of an answer."""
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_normalize(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("normalize") is not None:
            raise ApiError(400, "normalize is not supported; use use_activation", param="normalize")
        return data

    @model_validator(mode="after")
    def _check_forms(self) -> EmbeddingRequest:
        if (self.input is None) == (self.messages is None):
            raise ApiError(400, "send either input or messages", param="input")
        return self

    @property
    def conversations(self) -> list[Conversation]:
        """The conversations, if the request has any."""
        if not self.messages:
            return []
        if isinstance(self.messages[0], list):
            return self.messages
        return [self.messages]


def add_embeddings(router: APIRouter, gateway: Gateway) -> None:
    """Add the route POST /v1/embeddings, which other servers also have as /embeddings, to a router."""
    api = EmbeddingsApi(gateway)
    router.post("/v1/embeddings", response_model=None, responses=answers(Embeddings))(api.embed)
    router.post("/embeddings", response_model=None, responses=answers(Embeddings))(api.embed)


class EmbeddingsApi:
    """The route POST /v1/embeddings."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def embed(self, body: EmbeddingRequest, request: Request) -> Response:
        model = choose_model(self._gateway, body.model, "embed")
        response_id = choose_id(body.request_id, request)
        if body.input is None:
            inputs: Sequence[TextInput] = await _conversations(model, body, request)
        else:
            inputs = text_inputs(body.input, "input")
        body.check_count(len(inputs))
        options = body.pool_options(
            model,
            "embed",
            dimensions=body.dimensions,
            normalize=body.use_activation,
            prompt=prompt_named(model, body.prompt_name, "prompt_name"),
            add_special_tokens=body.add_special_tokens is not False,
        )
        pooled = await pool(model, request, inputs, options)
        head = {
            "id": response_id,
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "usage": pooled.usage(),
        }
        return await respond(request, head, pooled.rows, body, kind="embedding", name="embedding")


async def _conversations(model: ModelFleet, body: EmbeddingRequest, request: Request) -> list[TextInput]:
    """Return the tokens of each conversation. Raises ApiError if there are too many, or if one has media."""
    conversations = body.conversations
    check_count(len(conversations), "messages")
    if not model.tokenizer.chat_template_source:
        raise ApiError(400, "this model has no chat template for messages: send texts in input", param="messages")
    inputs = []
    for index, messages in enumerate(conversations):
        place = f"messages[{index}]" if body.messages is not messages else "messages"
        chat = ChatFields(
            messages=messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        prompt = await encode_conversation(model, chat, request, body.add_special_tokens is True)
        if prompt.media:
            raise ApiError(400, f"{place}: embeddings of images, videos and audio are not supported yet", param=place)
        inputs.append(TextInput(prompt.token_ids, place))
    return inputs
