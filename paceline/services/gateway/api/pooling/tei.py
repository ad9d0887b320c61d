"""Vectors, labels and similarity with the routes of Text Embeddings Inference (TEI).

Answers are bare lists. Errors have TEI's form and status, see `http/tei_errors.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field
from pydantic_core import to_json

import paceline
from paceline.core.pooling import POOL_TASKS, PoolRole, PoolTask
from paceline.services.gateway.api.api_schema import answers, errors_of
from paceline.services.gateway.api.pooling.bodies import (
    AllVectors,
    Predictions,
    Similarities,
    SparseVectors,
    TeiError,
    TeiInfo,
    Vectors,
)
from paceline.services.gateway.api.pooling.encoding import Json, Values, json_list, numbers_json, written, written_json
from paceline.services.gateway.api.pooling.inputs import (
    MAX_INPUTS,
    check_count,
    choose_model,
    prompt_named,
    text_inputs,
)
from paceline.services.gateway.api.pooling.pool import pool
from paceline.services.gateway.api.pooling.similarity import cosine
from paceline.services.gateway.api.pooling.vllm import label_names
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.pooling import PoolOptions, Side, TextInput
from paceline.services.gateway.planning.request_body import Body, NamedRequest
from paceline.services.gateway.planning.schemas import TokenId

Text = str | list[TokenId]
Pair = Annotated[list[str], Field(min_length=1, max_length=2)]


class Cutting(Body):
    """The fields that say how texts are cut that are too long."""

    truncate: bool | None = None
    """Whether texts that are too long are cut. Default: they are refused."""
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"
    """Side on which texts lose tokens."""

    @property
    def side(self) -> Side | None:
        if not self.truncate:
            return None
        return "start" if self.truncation_direction.lower() == "left" else "end"


class TeiRequest(NamedRequest, Cutting):
    """The body of POST /embed_all and /embed_sparse."""

    inputs: Text | list[Text]
    prompt_name: str | None = None
    """Name of the model's prompt to put before each text."""

    def text_inputs(self) -> list[TextInput]:
        return text_inputs(self.inputs, "inputs")  # type: ignore[arg-type]


class TeiEmbedRequest(TeiRequest):
    """The body of POST /embed."""

    normalize: bool = True
    dimensions: int | None = Field(None, ge=1)


class PredictRequest(NamedRequest, Cutting):
    """The body of POST /predict: a text, a pair of texts, or a list of lists with one or two texts."""

    inputs: str | Pair | list[Pair]
    raw_scores: bool = False
    """Whether labels have the model's own numbers instead of probabilities."""

    def text_inputs(self) -> list[TextInput]:
        given = self.inputs
        if self.is_single:
            return [TextInput(_one_or_pair(given), "inputs")]  # type: ignore[arg-type]
        check_count(len(given), "inputs")
        return [TextInput(_one_or_pair(each), f"inputs[{index}]") for index, each in enumerate(given)]

    @property
    def is_single(self) -> bool:
        return isinstance(self.inputs, str) or (bool(self.inputs) and isinstance(self.inputs[0], str))


class SimilarityInputs(Body):
    source_sentence: str
    sentences: list[str]


class SimilarityParameters(Cutting):
    prompt_name: str | None = None


class SimilarityRequest(NamedRequest):
    """The body of POST /similarity."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters = SimilarityParameters()


_ERRORS = errors_of(TeiError)
_POOLING = {"last": "last_token"}
"""TEI's names for ways of pooling, where they differ from ours."""


def add_tei(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes of TEI to a router, except /rerank, which has several forms."""
    api = TeiApi(gateway)
    router.post("/embed", response_model=None, responses=answers(Vectors) | _ERRORS)(api.embed)
    router.post("/embed_all", response_model=None, responses=answers(AllVectors) | _ERRORS)(api.embed_all)
    router.post("/embed_sparse", response_model=None, responses=answers(SparseVectors) | _ERRORS)(api.embed_sparse)
    router.post("/predict", response_model=None, responses=answers(Predictions) | _ERRORS)(api.predict)
    router.post("/similarity", response_model=None, responses=answers(Similarities) | _ERRORS)(api.similarity)
    router.get("/info", response_model=None, responses=answers(TeiInfo) | _ERRORS)(api.info)


class TeiApi:
    """The routes of TEI."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def embed(self, body: TeiEmbedRequest, request: Request) -> Response:
        rows = await self._pool(body, request, "embed", normalize=body.normalize, dimensions=body.dimensions)
        return await written(request, rows, lambda: written_json(json_list(map(numbers_json, rows))))

    async def embed_all(self, body: TeiRequest, request: Request) -> Response:
        rows = await self._pool(body, request, "token_embed")
        return await written(request, rows, lambda: written_json(json_list(map(numbers_json, rows))))

    async def embed_sparse(self, body: TeiRequest, request: Request) -> Response:
        rows = await self._pool(body, request, "sparse")
        return await written(request, rows, lambda: written_json(json_list(to_json(sparse_json(row)) for row in rows)))

    async def predict(self, body: PredictRequest, request: Request) -> Response:
        model = choose_model(self._gateway, body.model, "classify")
        options = PoolOptions(task="classify", activation=False if body.raw_scores else None, truncate=body.side)
        pooled = await pool(model, request, body.text_inputs(), options)

        def write() -> Response:
            labels = (to_json(_ranked_labels(model, row)) for row in pooled.rows)
            return written_json(next(labels) if body.is_single else json_list(labels))

        return await written(request, pooled.rows, write)

    async def similarity(self, body: SimilarityRequest, request: Request) -> Response:
        model = choose_model(self._gateway, body.model, "embed")
        check_count(len(body.inputs.sentences), "inputs.sentences", "sentences")
        others = [TextInput(text, f"inputs.sentences[{index}]") for index, text in enumerate(body.inputs.sentences)]
        inputs = [TextInput(body.inputs.source_sentence, "inputs.source_sentence"), *others]
        prompt = prompt_named(model, body.parameters.prompt_name, "parameters.prompt_name")
        pooled = await pool(model, request, inputs, PoolOptions(prompt=prompt, truncate=body.parameters.side))
        source, *rest = pooled.rows
        return await written(request, rest, lambda: written_json(to_json([cosine(source, row) for row in rest])))

    async def info(self, model: str | None = None) -> Json:
        return describe(choose_model(self._gateway, model, *POOL_TASKS))

    async def _pool(self, body: TeiRequest, request: Request, task: PoolTask, **options: Any) -> Sequence[Values]:
        model = choose_model(self._gateway, body.model, task)
        prompt = prompt_named(model, body.prompt_name, "prompt_name")
        role: PoolRole | None = "query" if body.prompt_name == "query" else None
        wanted = PoolOptions(task=task, prompt=prompt, role=role, truncate=body.side, **options)
        return (await pool(model, request, body.text_inputs(), wanted)).rows


def describe(model: ModelFleet) -> Json:
    """Return TEI's description of a model that pools."""
    pooling, tasks = model.pooling, model.tasks
    if pooling is None:
        raise ApiError(404, f"the model {model.name!r} only generates", param="model")
    named = {str(index): label for index, label in enumerate(pooling.labels or ("LABEL_0",))}
    labels = {"id2label": named, "label2id": {label: int(index) for index, label in named.items()}}
    kind: Json = {"embedding": {"pooling": "+".join(_POOLING.get(each, each) for each in pooling.pooling) or "none"}}
    if "score" in tasks:
        kind = {"reranker": labels}
    elif "classify" in tasks:
        kind = {"classifier": labels}
    return {
        "model_id": model.name,
        "model_sha": None,
        "model_dtype": dtype_of(model),
        "model_type": kind,
        "max_concurrent_requests": model.config.max_waiting,
        "max_input_length": pooling.max_tokens,
        "max_batch_tokens": pooling.max_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": MAX_INPUTS,
        "auto_truncate": False,
        "tokenization_workers": 1,
        "version": paceline.__version__,
        "sha": None,
        "docker_label": None,
    }


def dtype_of(model: ModelFleet) -> str:
    """Return the type of numbers in which the model's workers compute, such as "float32"; "" if none is known."""
    known = (each.member.numerics for each in model.fleet.snapshot())
    return next((numerics.dtype for numerics in known if numerics is not None), "")


def sparse_json(row: Values) -> list[Json]:
    """Return a sparse vector, whose rows are a token id and its weight, as objects in the order of ids."""
    return [{"index": int(token), "value": float(weight)} for token, weight in sorted(row.tolist())]


def _ranked_labels(model: ModelFleet, row: Values) -> list[Json]:
    """Return the labels with their numbers, the largest first."""
    pairs = sorted(zip(row.tolist(), label_names(model, row)), key=lambda pair: -pair[0])
    return [{"score": score, "label": label} for score, label in pairs]


def _one_or_pair(given: str | Sequence[str]) -> str | tuple[str, str]:
    if isinstance(given, str):
        return given
    return given[0] if len(given) == 1 else (given[0], given[1])
