"""Token ids in, token ids out: vLLM's routes for reinforcement learning and for routers that tokenize themselves."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from paceline.services.gateway.access.callers import caller_of
from paceline.services.gateway.api_schema import answers
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.planning import plan_tokens
from paceline.services.gateway.respond import choose_id, respond
from paceline.services.gateway.token_format import TokensFormat
from paceline.services.gateway.token_schemas import AbortRequest, TokensRequest
from paceline.services.gateway.vllm_bodies import GeneratedTokens, TokensChunk


def add_token_api(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes POST /inference/v1/generate and /abort_requests to a router."""

    @router.post("/inference/v1/generate", response_model=None, responses=answers(GeneratedTokens, chunk=TokensChunk))
    async def generate(body: TokensRequest, request: Request) -> Response:
        model = gateway.pick(body.model)
        request_id = choose_id(body.request_id, request)
        plan = await model.plan(lambda served: plan_tokens(body, served))
        tokens_format = TokensFormat(body, plan, request_id, model.name, model.tokenizer)
        return await respond(model, body, plan, tokens_format, request)

    @router.post("/abort_requests", response_class=Response)
    async def abort(body: AbortRequest, request: Request) -> Response:
        # An id may be unknown here because the request has ended just now, so this is no error.
        for request_id in body.request_ids:
            gateway.requests.abort(request_id, caller_of(request).may_see)
        return Response()
