"""Probabilities of tokens after texts: POST /generative_scoring."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.respond import choose_id, start, whole
from paceline.services.gateway.api.scoring.requests import MAX_PAIRS
from paceline.services.gateway.api.tokens.bodies import LabelScores
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.planning.plan import Plan, ServedModel
from paceline.services.gateway.planning.planning import plan_scores
from paceline.services.gateway.planning.request_body import NamedRequest
from paceline.services.gateway.planning.sampling import check_ids, check_no_media
from paceline.services.gateway.planning.schemas import MAX_LOGPROB_TOKENS, TokenId
from paceline.services.gateway.planning.scoring import label_probabilities
from paceline.services.gateway.planning.tokenizer import Tokenizer

Json = dict[str, Any]


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


def add_label_scores(router: APIRouter, gateway: Gateway) -> None:
    """Add the route POST /generative_scoring to a router."""

    @router.post("/generative_scoring", response_model=None, responses=answers(LabelScores))
    async def score_labels(body: LabelsRequest, request: Request) -> Response:
        model = gateway.pick(body.model)
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
            # The token that was generated for each prompt is no part of the answer.
            read = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
            return {**head, "results": results, "usage": read}

        return await whole(generation, request, finish)
