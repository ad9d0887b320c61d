"""Scores of documents for queries by a causal reranker, with the routes and shapes of vLLM, Jina and Cohere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.respond import choose_id, start, whole
from paceline.services.gateway.api.tokens.bodies import LabelScores, Ranking, Scores
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.plan import Plan, ServedModel
from paceline.services.gateway.planning.planning import plan_scores
from paceline.services.gateway.planning.request_body import Body, NamedRequest
from paceline.services.gateway.planning.sampling import check_ids, check_no_media
from paceline.services.gateway.planning.schemas import MAX_LOGPROB_TOKENS, TokenId
from paceline.services.gateway.planning.scoring import Cut, label_probabilities, probability
from paceline.services.gateway.planning.tokenizer import Tokenizer

Json = dict[str, Any]

MAX_PAIRS = 1000
"""Largest number of pairs of a query and a document in one request."""

_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Pairs of names that clients use for the fields with queries and documents."""


class Document(Body):
    """A document that a client sends as an object."""

    text: str


AnyText = str | Document
Texts = Annotated[list[AnyText], Field(min_length=1, max_length=MAX_PAIRS)]


class ScoringRequest(NamedRequest):
    """The fields that /score and /rerank share."""

    request_id: str | None = None
    instruction: str | None = None
    """Instruction that tells the model when a document fits a query. Default: the document answers a web search."""
    use_activation: bool | None = None
    """If false, a score is the difference of the two tokens' logprobs instead of a probability."""

    max_tokens_per_doc: int | None = Field(None, ge=0)
    """Number of tokens to which documents are cut; 0 and None are no limit."""
    max_tokens_per_query: int | None = Field(None, ge=0)
    """Number of tokens to which queries are cut; 0 and None are no limit."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Largest number of tokens of a prompt; -1 for as many as the context has. Documents of longer prompts are cut."""

    @model_validator(mode="before")
    @classmethod
    def _check_chunks(cls, data: Any) -> Any:
        name = "max_chunks_per_doc"
        if isinstance(data, dict) and data.get(name) is not None:
            raise ApiError(400, f"{name} is not supported; cut documents with max_tokens_per_doc", param=name)
        return data

    def score(self, margin: float) -> float:
        return margin if self.use_activation is False else probability(margin)


class ScoreRequest(ScoringRequest):
    """The body of POST /score. There are as many documents as queries, or a single query with many documents.

    Queries and documents have one of the pairs of names in `_NAMES`.
    """

    text_1: AnyText | Texts | None = None
    text_2: AnyText | Texts | None = None
    queries: AnyText | Texts | None = None
    documents: AnyText | Texts | None = None
    items: AnyText | Texts | None = None
    data_1: AnyText | Texts | None = None
    data_2: AnyText | Texts | None = None

    def pairs(self) -> dict[str, tuple[str, str]]:
        """Return each pair of a query and a document, by the document's field, such as "documents[0]".

        Raises ApiError if queries or documents are missing, or if their numbers do not match.
        """
        for query_name, document_name in _NAMES:
            queries, documents = _texts(getattr(self, query_name)), _texts(getattr(self, document_name))
            if queries and documents:
                break
        else:
            raise ApiError(400, "send text_1 and text_2, or queries and documents", param="text_1")
        if len(queries) not in (1, len(documents)):
            message = (
                f"{query_name} must be one text, or as many as {document_name}, which has {len(documents)}; "
                f"it has {len(queries)}"
            )
            raise ApiError(400, message, param=query_name)
        queries = queries * len(documents) if len(queries) == 1 else queries
        return {f"{document_name}[{index}]": pair for index, pair in enumerate(zip(queries, documents))}


class RerankRequest(ScoringRequest):
    """The body of POST /rerank."""

    query: AnyText
    documents: Texts
    top_n: int | None = Field(None, ge=0)
    """Number of documents to return, the best ones; 0 returns all."""
    return_documents: bool = True

    def pairs(self) -> dict[str, tuple[str, str]]:
        """Return each document with the query before it, by the document's field, such as "documents[0]"."""
        (query,) = _texts(self.query)
        return {f"documents[{index}]": (query, text) for index, text in enumerate(_texts(self.documents))}


class LabelsRequest(NamedRequest):
    """The body of POST /generative_scoring, which asks how likely some tokens are after each item."""

    request_id: str | None = None
    query: str | list[TokenId]
    items: Annotated[list[str | list[TokenId]], Field(min_length=1, max_length=MAX_PAIRS)]
    label_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LOGPROB_TOKENS)]
    apply_softmax: bool = True
    """Whether the probabilities of the labels sum to 1. Otherwise the probabilities of all tokens sum to 1."""
    item_first: bool = False
    """Whether an item comes before the query."""
    add_special_tokens: bool = True

    def prompts(self, tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
        """Yield the name of each item's field, such as "items[0]", and the item's prompt.

        Raises InvalidRequestError if a token id is not valid.
        """
        for index, item in enumerate(self.items):
            parts: list[tuple[str | list[int], str]] = [(self.query, "query"), (item, f"items[{index}]")]
            ids: list[int] = []
            for part, place in reversed(parts) if self.item_first else parts:
                if isinstance(part, str):
                    ids += tokenizer.encode(part, self.add_special_tokens and not ids, place)
                else:
                    check_ids(part, tokenizer.vocab_size, place)
                    check_no_media(part, tokenizer, place)
                    ids += part
            yield f"items[{index}]", ids


def add_score_api(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes that score and rerank documents to a router."""
    api = ScoreApi(gateway)
    router.post("/v1/score", response_model=None, responses=answers(Scores))(api.score)
    router.post("/score", response_model=None, responses=answers(Scores))(api.score)
    router.post("/v2/rerank", response_model=None, responses=answers(Ranking))(api.rerank)
    router.post("/v1/rerank", response_model=None, responses=answers(Ranking))(api.rerank)
    router.post("/rerank", response_model=None, responses=answers(Ranking))(api.rerank)
    router.post("/generative_scoring", response_model=None, responses=answers(LabelScores))(api.score_labels)


class ScoreApi:
    """The routes that score and rerank documents."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def score(self, body: ScoreRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)

        def answer(margins: Sequence[float], usage: Json, response_id: str) -> Json:
            entries = [
                {"index": index, "object": "score", "score": body.score(margin)} for index, margin in enumerate(margins)
            ]
            head = {"id": response_id, "object": "list", "created": int(time.time()), "model": model.name}
            return {**head, "data": entries, "usage": usage}

        return await _respond(model, body, body.pairs(), request, answer)

    async def rerank(self, body: RerankRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        pairs = body.pairs()

        def answer(margins: Sequence[float], usage: Json, response_id: str) -> Json:
            documents = [document for _, document in pairs.values()]
            best = sorted(range(len(margins)), key=lambda index: -margins[index])[: body.top_n or len(margins)]
            results = [
                {"index": index, "relevance_score": body.score(margins[index])}
                | ({"document": {"text": documents[index]}} if body.return_documents else {})
                for index in best
            ]
            return {"id": response_id, "model": model.name, "results": results, "usage": usage}

        return await _respond(model, body, pairs, request, answer)

    async def score_labels(self, body: LabelsRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        response_id = choose_id(body.request_id, request)
        labels = list(dict.fromkeys(body.label_token_ids))

        def plan(served: ServedModel) -> Plan:
            check_ids(labels, served.tokenizer.vocab_size, "label_token_ids")
            return plan_scores(body.prompts(served.tokenizer), labels, served)

        generation = await start(model, await model.plan(request, plan), request, is_streamed=False)

        def finish(choices: Sequence[Delta], usage: Json) -> Json:
            results = [
                {"index": index, "token_probs": label_probabilities(choice.tokens[0], labels, body.apply_softmax)}
                for index, choice in enumerate(choices)
            ]
            head = {"id": response_id, "object": "generative_score", "created": int(time.time()), "model": model.name}
            return {**head, "results": results, "usage": _read_alone(usage)}

        return await whole(generation, request, finish)


async def _respond(
    model: ModelFleet,
    body: ScoringRequest,
    pairs: Mapping[str, tuple[str, str]],
    request: Request,
    answer: Callable[[Sequence[float], Json, str], Json],
) -> Response:
    """Compute the margin of each pair, see `Scoring.margin`, and return the response.

    Args:
        pairs: each query with its document, by the document's field.
        answer: returns the JSON body from the margins, the usage and the response's id.
    """
    response_id = choose_id(body.request_id, request)
    scoring = model.scoring

    def plan(served: ServedModel) -> Plan:
        token_ids = scoring.token_ids
        # Each query once: all documents may have the same one, and it may be as large as a body.
        queries = {
            query: scoring.cut(query, body.max_tokens_per_query) for query in {pair[0] for pair in pairs.values()}
        }
        cut = Cut(body.max_tokens_per_doc, _limit(body, served))
        # One after another, because all texts together may be a thousand times as long as the request.
        prompts = (
            (place, cut.prompt(scoring, queries[query], document, body.instruction, place))
            for place, (query, document) in pairs.items()
        )
        return plan_scores(prompts, token_ids, served)

    generation = await start(model, await model.plan(request, plan), request, is_streamed=False)

    def finish(choices: Sequence[Delta], usage: Json) -> Json:
        margins = [scoring.margin(choice.tokens[0]) for choice in choices]
        return answer(margins, _read_alone(usage), response_id)

    return await whole(generation, request, finish)


def _read_alone(usage: Json) -> Json:
    """Return a usage without the token that was generated for each prompt, because it is no part of the answer."""
    return {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}


def _limit(body: ScoringRequest, model: ServedModel) -> int | None:
    """Return the largest number of tokens of a prompt; None if none is cut. It leaves room for one generated token."""
    limit = body.truncate_prompt_tokens
    return None if limit is None else model.max_model_len - 1 if limit == -1 else limit


def _texts(given: AnyText | Sequence[AnyText] | None) -> list[str]:
    listed = [] if given is None else [given] if isinstance(given, AnyText) else given
    return [each if isinstance(each, str) else each.text for each in listed]
