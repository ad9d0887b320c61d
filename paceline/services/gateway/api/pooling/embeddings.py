"""Embeddings with the route of OpenAI and the further fields of vLLM."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.pooling.bodies import Embeddings
from paceline.services.gateway.api.pooling.conversations import InputOrMessages
from paceline.services.gateway.api.pooling.encoding import EncodingFields, respond
from paceline.services.gateway.api.pooling.inputs import choose_model, prompt_named
from paceline.services.gateway.api.pooling.pool import pool
from paceline.services.gateway.api.respond import choose_id
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError


class EmbeddingRequest(InputOrMessages, EncodingFields):
    """The body of POST /v1/embeddings."""

    dimensions: int | None = Field(None, ge=1)
    """Length to which embeddings are cut before they get the length 1. Default: the model's own."""
    prompt_name: str | None = None
    """Name of the model's prompt that stands before each text. Default: the model's default prompt, if it has one."""
    use_activation: bool | None = None
    """Whether embeddings get the length 1. Default: as the checkpoint says."""

    @model_validator(mode="before")
    @classmethod
    def _check_normalize(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("normalize") is not None:
            raise ApiError(400, "normalize is not supported; use use_activation", param="normalize")
        return data


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
        inputs = await body.inputs(model, request)
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
