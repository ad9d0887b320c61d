"""The routes /score and /rerank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import to_json

from paceline.services.gateway.api.api_schema import ErrorBody, answers, errors_of
from paceline.services.gateway.api.pooling.bodies import Ranking, Scores, TeiError, TeiRanking
from paceline.services.gateway.api.pooling.encoding import json_list, json_object, written_json
from paceline.services.gateway.api.pooling.inputs import choose_model
from paceline.services.gateway.api.respond import choose_id
from paceline.services.gateway.api.scoring.judges import Judged, Pairs, judge
from paceline.services.gateway.api.scoring.requests import RerankRequest, ScoreRequest
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.request_scope import aside, scope_of
from paceline.services.gateway.model_fleet import ModelFleet

Json = dict[str, Any]

SMALL_CHARACTERS = 64 << 10
"""Largest number of characters of documents in an answer that is written on the event loop."""


def add_scoring(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes that score and rank documents to a router."""
    api = ScoringApi(gateway)
    for path in ("/v1/score", "/score"):
        router.post(path, response_model=None, responses=answers(Scores))(api.score)
    for path in ("/v2/rerank", "/v1/rerank"):
        router.post(path, response_model=None, responses=answers(Ranking))(api.rerank)
    responses = answers(Ranking | TeiRanking) | errors_of(ErrorBody, TeiError)
    router.post("/rerank", response_model=None, responses=responses)(api.rerank)


class ScoringApi:
    """The routes that score and rank documents."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def score(self, body: ScoreRequest, request: Request) -> Response:
        model = self._pick(body.model)
        response_id = choose_id(body.request_id, request)
        judged = await judge(model, request, body, body.pairs())
        entries = [{"index": index, "object": "score", "score": score} for index, score in enumerate(judged.scores)]
        head = {"id": response_id, "object": "list", "created": int(time.time()), "model": model.name}
        return written_json(to_json({**head, "data": entries, "usage": judged.usage}))

    async def rerank(self, body: RerankRequest, request: Request) -> Response:
        scope_of(request).is_tei = body.is_tei
        model = self._pick(body.model)
        pairs = body.pairs()
        response_id = choose_id(body.request_id, request)
        judged = await judge(model, request, body, pairs)
        if body.is_tei:
            return await _written(request, pairs, lambda: _tei_ranking(body, pairs, judged))
        head = {"id": response_id, "model": model.name, "usage": judged.usage}
        return await _written(request, pairs, lambda: json_object(head, results=_ranking(body, pairs, judged)))

    def _pick(self, name: str | None) -> ModelFleet:
        if name is None and len(self._gateway.models) > 1:
            return choose_model(self._gateway, name, "score", "embed", "token_embed")
        return self._gateway.pick(name)


def _ranking(body: RerankRequest, pairs: Pairs, judged: Judged) -> bytes:
    documents = [document for _, document in pairs.values()]
    results: Iterator[Json] = (
        {"index": index, "relevance_score": judged.scores[index]}
        | ({"document": {"text": documents[index]}} if body.return_documents else {})
        for index in _best_first(judged)[: body.top_n or len(documents)]
    )
    return json_list(map(to_json, results))


def _tei_ranking(body: RerankRequest, pairs: Pairs, judged: Judged) -> bytes:
    documents = [document for _, document in pairs.values()]
    results: Iterator[Json] = (
        {"index": index, "score": judged.scores[index]} | ({"text": documents[index]} if body.return_text else {})
        for index in _best_first(judged)
    )
    return json_list(map(to_json, results))


def _best_first(judged: Judged) -> list[int]:
    """Return the indexes of documents, the best one first. Equally good ones keep their order."""
    return sorted(range(len(judged.scores)), key=lambda index: -judged.scores[index])


async def _written(request: Request, pairs: Pairs, make: Callable[[], bytes]) -> Response:
    """Return the response with the JSON that `make` returns, made on a thread if the documents are long."""

    def write() -> Response:
        return written_json(make())

    is_small = sum(len(document) for _, document in pairs.values()) <= SMALL_CHARACTERS
    return write() if is_small else await aside(request, write)
