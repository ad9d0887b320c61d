"""Vectors and labels with the routes of vLLM: /pooling gives the numbers of any task, /classify labels."""

from __future__ import annotations

import time
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field
from pydantic_core import to_json

from paceline.core.pooling import POOL_TASKS, PoolTask
from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.pooling.bodies import Labels, PoolingAnswer
from paceline.services.gateway.api.pooling.conversations import InputOrMessages
from paceline.services.gateway.api.pooling.encoding import (
    EncodingFields,
    Values,
    json_list,
    json_object,
    respond,
    written,
    written_json,
)
from paceline.services.gateway.api.pooling.inputs import choose_model, prompt_named
from paceline.services.gateway.api.pooling.pool import pool
from paceline.services.gateway.api.respond import choose_id
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.model_fleet import ModelFleet

PREFERRED: tuple[PoolTask, ...] = ("embed", "classify", "score", "token_embed", "token_classify", "sparse")
"""The tasks in the order in which /pooling chooses one if the client names none."""


class PoolingRequest(InputOrMessages, EncodingFields):
    """The body of POST /pooling."""

    task: Literal["embed", "classify", "token_embed", "token_classify", "score", "sparse", "plugin"] | None = None
    """What to compute. Default: the first task of the model in PREFERRED."""
    prompt_name: str | None = None
    """Name of the model's prompt that stands before each text. "query" also makes the inputs queries, for models whose
    vectors of tokens differ between queries and documents. Default: no prompt, and documents."""
    dimensions: int | None = Field(None, ge=1)
    """Length to which embeddings are cut."""
    use_activation: bool | None = None
    """Whether labels get probabilities, and whether vectors get the length 1. Default: as the checkpoint says."""


class ClassifyRequest(InputOrMessages):
    """The body of POST /classify."""

    use_activation: bool | None = None
    """Whether labels get probabilities. Default: true, if the checkpoint has a function for it."""


def add_vllm(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes POST /pooling, /classify and /v1/classify to a router."""
    api = VllmPoolingApi(gateway)
    router.post("/pooling", response_model=None, responses=answers(PoolingAnswer))(api.pooling)
    router.post("/classify", response_model=None, responses=answers(Labels))(api.classify)
    router.post("/v1/classify", response_model=None, responses=answers(Labels))(api.classify)


class VllmPoolingApi:
    """The routes POST /pooling and /classify."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def pooling(self, body: PoolingRequest, request: Request) -> Response:
        if body.task == "plugin":
            raise ApiError(400, "task: there are no plugins here; name one of the model's tasks", param="task")
        asked: PoolTask | None = body.task
        model = choose_model(self._gateway, body.model, *(POOL_TASKS if asked is None else (asked,)))
        task = next(each for each in PREFERRED if each in model.tasks) if asked is None else asked
        if body.dimensions is not None and task != "embed":
            raise ApiError(400, f"dimensions are for the task embed, and the task is {task}", param="dimensions")
        inputs = await body.inputs(model, request)
        body.check_count(len(inputs))
        options = body.pool_options(
            model,
            task,
            dimensions=body.dimensions,
            normalize=body.use_activation if task in ("embed", "token_embed") else None,
            activation=body.use_activation,
            prompt="" if body.prompt_name is None else prompt_named(model, body.prompt_name, "prompt_name"),
            role="query" if body.prompt_name == "query" else None,
            add_special_tokens=body.add_special_tokens is not False,
        )
        response_id = choose_id(body.request_id, request)
        pooled = await pool(model, request, inputs, options)
        head = {**_head(response_id, model), "usage": pooled.usage()}
        return await respond(request, head, pooled.rows, body, kind="pooling", name="data")

    async def classify(self, body: ClassifyRequest, request: Request) -> Response:
        model = choose_model(self._gateway, body.model, "classify")
        options = body.pool_options(
            model, "classify", activation=body.use_activation, add_special_tokens=body.add_special_tokens is not False
        )
        response_id = choose_id(body.request_id, request)
        pooled = await pool(model, request, await body.inputs(model, request), options)
        head = {**_head(response_id, model), "usage": pooled.usage()}

        def write() -> Response:
            names = label_names(model, pooled.rows[0])
            entries = (
                {"index": index, "label": names[int(np.argmax(row))], "probs": row.tolist(), "num_classes": row.size}
                for index, row in enumerate(pooled.rows)
            )
            return written_json(json_object(head, data=json_list(map(to_json, entries))))

        return await written(request, pooled.rows, write)


def label_names(model: ModelFleet, row: Values) -> list[str]:
    """Return the names of a model's labels, of which `row` has the numbers."""
    labels = () if model.pooling is None else model.pooling.labels
    return [labels[index] if index < len(labels) else f"LABEL_{index}" for index in range(row.size)]


def _head(response_id: str, model: ModelFleet) -> dict[str, Any]:
    return {"id": response_id, "object": "list", "created": int(time.time()), "model": model.name}
