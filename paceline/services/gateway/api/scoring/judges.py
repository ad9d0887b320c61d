"""The ways to score a document for a query. The tasks of the model decide which one is taken.

score: the model reads both texts at once. embed: the cosine of two vectors. token_embed: MaxSim of the vectors of
tokens. A model that only generates is asked whether the document fits, and the logprobs of yes and no are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from fastapi import Request
from numpy.typing import NDArray

from paceline.core.pooling import PoolRole
from paceline.services.gateway.api.pooling.cohere import purpose_prompt
from paceline.services.gateway.api.pooling.inputs import check_limit, wrong_task
from paceline.services.gateway.api.pooling.pool import Pooled, pool, pool_parts
from paceline.services.gateway.api.pooling.similarity import cosine, max_sim
from paceline.services.gateway.api.respond import start
from paceline.services.gateway.api.scoring.requests import ScoringRequest
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.event_streams import until_disconnect
from paceline.services.gateway.http.request_scope import aside
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.plan import Plan, ServedModel
from paceline.services.gateway.planning.planning import plan_scores
from paceline.services.gateway.planning.pooling import PoolOptions, TextInput
from paceline.services.gateway.planning.scoring import Cut, Scoring, probability

Json = dict[str, Any]
Pairs = Mapping[str, tuple[str, str]]
"""Each pair of a query and a document, by the field that has the document, such as "documents[0]"."""
Similarity = Callable[[NDArray[np.float32], NDArray[np.float32]], float]


@dataclass(frozen=True, slots=True)
class Judged:
    """The scores of pairs, in their order. A document that fits better has a larger score."""

    scores: list[float]
    usage: Json


async def judge(model: ModelFleet, request: Request, body: ScoringRequest, pairs: Pairs) -> Judged:
    """Score each pair, in the way that fits the model's tasks.

    Raises ApiError if the model has no task for it, and the errors of `pool` and `start`.
    """
    tasks = model.tasks
    if model.pooling is None:
        return await _by_answers(model, request, body, pairs)
    if "score" in tasks:
        return await _by_reading_both(model, request, body, pairs)
    if body.instruction is not None:
        raise ApiError(400, "instruction: this model takes none; it embeds each text alone", param="instruction")
    if "embed" in tasks:
        return await _by_vectors(model, request, body, pairs, PoolOptions(task="embed"), cosine)
    if "token_embed" in tasks:
        return await _by_vectors(model, request, body, pairs, PoolOptions(task="token_embed"), max_sim)
    raise wrong_task(model, "score", "embed", "token_embed")


async def _by_reading_both(model: ModelFleet, request: Request, body: ScoringRequest, pairs: Pairs) -> Judged:
    """Score pairs by a model that reads a query and a document as one input."""
    pooling = model.pooling
    assert pooling is not None
    options = replace(_options(model, body, PoolOptions(task="score")), activation=body.use_activation)
    if pooling.is_encoder:
        if body.instruction is not None:
            raise ApiError(400, "instruction: this model takes none", param="instruction")
        cut = await aside(request, _cut_texts, model.scoring, body, pairs)
        inputs = [TextInput(pair, place) for place, pair in cut.items()]
    else:
        most = pooling.max_tokens

        def render() -> list[TextInput]:
            tokenizer = model.tokenizer
            prompts = _prompts(model.scoring, body, pairs, most)
            return [TextInput(tokenizer.encode(prompt, False, place), place) for place, prompt in prompts]

        inputs = await aside(request, render)
    pooled = await pool(model, request, inputs, options)
    return Judged([float(row[0]) for row in pooled.rows], pooled.usage())


async def _by_vectors(
    model: ModelFleet,
    request: Request,
    body: ScoringRequest,
    pairs: Pairs,
    options: PoolOptions,
    similarity: Similarity,
) -> Judged:
    """Score pairs by the similarity of vectors that each text has alone. A query is computed once for all documents."""
    options = _options(model, body, options)
    cut = await aside(request, _cut_texts, model.scoring, body, pairs)
    queries = {query: index for index, query in enumerate(dict.fromkeys(query for query, _ in cut.values()))}
    asked = [TextInput(query, f"query of {next(iter(pairs))}" if len(queries) == 1 else "queries") for query in queries]
    documents = [TextInput(document, place) for place, (_, document) in cut.items()]

    def part(inputs: Sequence[TextInput], role: PoolRole) -> tuple[Sequence[TextInput], PoolOptions]:
        return inputs, replace(options, prompt=purpose_prompt(model, f"search_{role}"), role=role)

    first, second = await pool_parts(model, request, [part(asked, "query"), part(documents, "document")])

    def compare() -> list[float]:
        numbers = (queries[query] for query, _ in cut.values())
        return [similarity(first.rows[number], row) for number, row in zip(numbers, second.rows, strict=True)]

    return Judged(await aside(request, compare), _sum_usage([first, second]))


async def _by_answers(model: ModelFleet, request: Request, body: ScoringRequest, pairs: Pairs) -> Judged:
    """Score pairs by a model that generates: by its logprobs of yes and no after a prompt with both texts."""
    scoring = model.scoring

    def plan(served: ServedModel) -> Plan:
        token_ids = scoring.token_ids
        # One token is generated, so the prompt may have one less than the context.
        return plan_scores(_prompts(scoring, body, pairs, served.max_model_len - 1), token_ids, served)

    generation = await start(model, await model.plan(request, plan), request, is_streamed=False)
    choices = await until_disconnect(request.receive, generation.whole())
    margins = [scoring.margin(choice.tokens[0]) for choice in choices]
    usage = generation.usage()
    scores = margins if body.use_activation is False else [probability(margin) for margin in margins]
    # The token that was generated for each prompt is no part of the answer.
    return Judged(scores, {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]})


def _prompts(scoring: Scoring, body: ScoringRequest, pairs: Pairs, most: int) -> Any:
    """Yield the prompt of each pair with the field of its document, cut as the request says.

    Args:
        most: largest number of tokens of a prompt.
    """
    # Each query once: all documents may have the same one, and it may be as large as a body.
    queries = {query: scoring.cut(query, body.max_tokens_per_query) for query in {pair[0] for pair in pairs.values()}}
    limit = body.truncate_prompt_tokens
    cut = Cut(body.max_tokens_per_doc, most if limit == -1 else limit)
    # One after another, because all texts together may be a thousand times as long as the request.
    for place, (query, document) in pairs.items():
        yield place, cut.prompt(scoring, queries[query], document, body.instruction, place)


def _cut_texts(scoring: Scoring, body: ScoringRequest, pairs: Pairs) -> Pairs:
    """Return the pairs with queries and documents cut to the request's limits of tokens."""
    if not body.max_tokens_per_query and not body.max_tokens_per_doc:
        return pairs
    queries = {query: scoring.cut(query, body.max_tokens_per_query) for query in {pair[0] for pair in pairs.values()}}
    return {
        place: (queries[query], scoring.cut(document, body.max_tokens_per_doc))
        for place, (query, document) in pairs.items()
    }


def _options(model: ModelFleet, body: ScoringRequest, options: PoolOptions) -> PoolOptions:
    limit = body.truncate_prompt_tokens
    check_limit(model, limit)
    return replace(
        options,
        truncate=None if limit is None else "end",
        max_tokens=None if limit in (None, -1) else limit,
        priority=body.priority,
    )


def _sum_usage(sides: Sequence[Pooled]) -> Json:
    """Return the usage of several parts of a request together."""
    both = Pooled(
        rows=[],
        token_ids=[ids for side in sides for ids in side.token_ids],
        cut_tokens=[cut for side in sides for cut in side.cut_tokens],
    )
    return both.usage()
