"""Token ids in, token ids out: vLLM's routes for reinforcement learning and for routers that tokenize themselves."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.core.pooling import PoolTask
from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.respond import choose_id, respond
from paceline.services.gateway.api.tokens.bodies import GeneratedTokens, TokensChunk
from paceline.services.gateway.api.tokens.token_format import TokensFormat
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.reading import parse
from paceline.services.gateway.http.request_scope import aside, scope_of
from paceline.services.gateway.planning.planning import in_sampling_params, plan_tokens
from paceline.services.gateway.planning.token_schemas import AbortRequest, TokensRequest

_POOLED: Sequence[tuple[PoolTask, str]] = (
    ("embed", "/v1/embeddings"),
    ("classify", "/classify"),
    ("token_embed", "/pooling"),
)
"""The routes of models that pool, by task, for bodies with an input or messages. Other tasks have /pooling."""

_INVOKED: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("/v1/chat/completions", (("messages",),)),
    ("/v1/completions", (("prompt",),)),
    ("/v1/responses", (("input",),)),
    ("/inference/v1/generate", (("token_ids",),)),
    ("/generative_scoring", (("label_token_ids",),)),
    ("/rerank", (("query", "documents"), ("query", "texts"))),
    ("/v2/embed", (("texts",),)),
    ("/embed", (("inputs",),)),
    ("/score", (("queries",), ("text_1",), ("data_1",))),
)
"""The routes that /invocations may stand for, each with the fields by which its bodies are recognized."""


def add_token_api(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes POST /inference/v1/generate, /invocations and /abort_requests to a router."""
    api = TokensApi(router, gateway)
    router.post("/inference/v1/generate", response_model=None, responses=answers(GeneratedTokens, chunk=TokensChunk))(
        api.generate
    )
    router.post("/invocations", response_class=Response)(api.invoke)
    router.post("/abort_requests", response_class=Response)(api.abort)


class TokensApi:
    """The routes POST /inference/v1/generate, /invocations and /abort_requests."""

    def __init__(self, router: APIRouter, gateway: Gateway) -> None:
        self._router = router
        self._gateway = gateway

    async def generate(self, body: TokensRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        request_id = choose_id(body.request_id, request)
        plan = await model.plan(request, lambda served: plan_tokens(body, served))
        with in_sampling_params():
            plan = await model.constrained(plan, scope_of(request).owner)
        tokens_format = TokensFormat(body, plan, request_id, model.name, model.tokenizer)
        return await respond(model, body, plan, tokens_format, request)

    async def invoke(self, request: Request) -> Response:
        """Answer like the route that takes such a body. Amazon SageMaker sends all requests to this one path."""
        body = await request.body()
        path, name = await aside(request, _route_of, body)
        if path in ("/v1/chat/completions", "/v1/responses") and (tasks := self._gateway.find(name).tasks):
            path = next((route for task, route in _POOLED if task in tasks), "/pooling")
        return OtherRoute(self._router, path, body)

    async def abort(self, body: AbortRequest, request: Request) -> Response:
        # An id may be unknown here because the request has ended just now, so this is no error.
        for request_id in body.request_ids:
            self._gateway.abort(request_id, scope_of(request).caller.may_see)
        return Response()


class OtherRoute(Response):
    """The response of another route of a router to the same body."""

    def __init__(self, router: APIRouter, path: str, body: bytes) -> None:
        super().__init__()
        self._router = router
        self._path = path
        self._asked: Message = {"type": "http.request", "body": body, "more_body": False}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread = [self._asked]

        async def again() -> Message:
            return unread.pop() if unread else await receive()

        await self._router({**scope, "path": self._path, "raw_path": self._path.encode()}, again, send)


def _route_of(body: bytes) -> tuple[str, str | None]:
    """Return the path of the route that takes a body, and the model in the body. Raises ApiError if no route does."""
    try:
        fields = parse(body)
    except (RequestValidationError, ApiError):
        fields = None
    fields = fields if isinstance(fields, dict) else {}
    for path, names in _INVOKED:
        if any(fields.keys() >= {*each} for each in names):
            return path, name if isinstance(name := fields.get("model"), str) else None
    message = "the body must be that of a chat, a completion, a response, embeddings, a score or a reranking"
    raise ApiError(400, f"{message}, as a JSON object", param="messages")
