"""The gateway as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import paceline
from paceline.core import env
from paceline.core.config import GatewayConfig
from paceline.core.options import listed, parse_bytes
from paceline.services.common.rpc import is_loopback
from paceline.services.gateway.api.api_schema import ERRORS, ErrorBody, add_schema
from paceline.services.gateway.api.batches.routes import add_batches
from paceline.services.gateway.api.console.routes import add_console
from paceline.services.gateway.api.messages.bodies import MessageError, MessageEvent
from paceline.services.gateway.api.messages.routes import add_messages
from paceline.services.gateway.api.openai.bodies import ChatChunk, CompletionChunk
from paceline.services.gateway.api.openai.routes import add_chat_batch, add_openai
from paceline.services.gateway.api.operators.adapters import add_adapters
from paceline.services.gateway.api.operators.cache_reset import add_cache_reset
from paceline.services.gateway.api.operators.routes import add_operations
from paceline.services.gateway.api.operators.scaling import add_scaling
from paceline.services.gateway.api.operators.sleep import add_sleep
from paceline.services.gateway.api.operators.step_records import add_step_records
from paceline.services.gateway.api.pooling.bodies import TeiError
from paceline.services.gateway.api.pooling.cohere import add_cohere
from paceline.services.gateway.api.pooling.embeddings import add_embeddings
from paceline.services.gateway.api.pooling.tei import add_tei
from paceline.services.gateway.api.pooling.vllm import add_vllm
from paceline.services.gateway.api.responses.bodies import ResponseEvent
from paceline.services.gateway.api.responses.routes import add_responses
from paceline.services.gateway.api.scoring.routes import add_scoring
from paceline.services.gateway.api.tokens.bodies import TokensChunk
from paceline.services.gateway.api.tokens.label_scores import add_label_scores
from paceline.services.gateway.api.tokens.render_api import add_render_api
from paceline.services.gateway.api.tokens.routes import add_token_api
from paceline.services.gateway.api.tokens.tokenizing import add_tokenizing
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.access.callers import cors_options
from paceline.services.gateway.http.bodies import BodyMiddleware
from paceline.services.gateway.http.bounds import BodyMemory, Bounds
from paceline.services.gateway.http.error_responses import install_error_handlers
from paceline.services.gateway.http.guard import Guard, warn_without_admins
from paceline.services.gateway.http.middleware import CountResponsesMiddleware, RequestScopeMiddleware
from paceline.services.gateway.http.paths import (
    DECISIONS,
    HeadMiddleware,
    PathMiddleware,
    check_decided,
    check_root_path,
)
from paceline.services.gateway.http.reading import BodyRoute
from paceline.services.gateway.store.database import open_database
from paceline.services.gateway.store.store import Store

_REFERENCED = (CompletionChunk, ChatChunk, TokensChunk, MessageEvent, ResponseEvent, ErrorBody, MessageError, TeiError)
"""Types of streamed events and of error bodies, to which `/openapi.json` refers."""


def create_app(gateway: Gateway) -> FastAPI:
    """Return an application that starts `gateway` when it starts, and closes it when it ends.

    Raises:
        ConfigError: there is no driver for the database of the store, the options about other origins contradict each
            other, or the root path is the beginning of a path of the API.
        LookupError: DECISIONS does not say who may call one of the routes.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        async with contextlib.AsyncExitStack() as closing:
            if store is not None:
                closing.push_async_callback(asyncio.to_thread, store.close)
            closing.push_async_callback(gateway.close)
            if runs is not None:
                closing.push_async_callback(runs.close)
            if batches is not None:
                batches.start()
                closing.push_async_callback(batches.close)
            yield

    config = gateway.config
    check_root_path(config.root_path, DECISIONS)
    store = _open_store(config)
    app = FastAPI(
        title="Paceline",
        version=paceline.__version__,
        lifespan=lifespan,
        openapi_url=None,  # see `add_schema`
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        servers=[{"url": config.root_path}] if config.root_path else None,
        responses=ERRORS,
        # We make our own spans and metrics. A second set would cost as much as all else that comes before placement.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.router.route_class = BodyRoute
    add_schema(app, _REFERENCED)
    install_error_handlers(app)
    # Functions `add_…` use the router of the application, because FastAPI makes each route of an included one twice.
    add_openai(app.router, gateway)
    add_messages(app.router, gateway)
    add_chat_batch(app.router, gateway)
    add_token_api(app.router, gateway)
    add_render_api(app.router, gateway)
    runs = add_responses(app.router, gateway, store)
    add_operations(app.router, gateway)
    for add in (add_scoring, add_label_scores, add_embeddings, add_cohere, add_vllm, add_tei, add_tokenizing):
        add(app.router, gateway)
    add_scaling(app.router, gateway)
    add_cache_reset(app.router, gateway)
    add_adapters(app.router, gateway)
    add_sleep(app.router, gateway)
    add_step_records(app.router, gateway)
    add_console(app.router, gateway)
    batches = add_batches(app.router, gateway, store, app)
    check_decided(app.routes)
    is_exposed = not config.uds and not is_loopback(config.host)
    warn_without_admins(gateway.keys, is_exposed)
    # The middleware that is added last sees a request first.
    app.add_middleware(
        Guard,
        book=gateway.keys,
        limiter=gateway.limiter,
        origins=listed(config.allowed_origins),
        is_exposed=is_exposed,
    )
    app.add_middleware(
        BodyMiddleware,
        max_bytes=config.max_body_bytes,
        max_upload_bytes=parse_bytes(config.max_file_size),
    )
    if (cors := cors_options(config)) is not None:
        app.add_middleware(CORSMiddleware, **cors)
    app.add_middleware(
        RequestScopeMiddleware,
        pool=gateway.bodies,
        bounds=Bounds.of(config),
        memory=BodyMemory(parse_bytes(config.body_memory)),
    )
    app.add_middleware(CountResponsesMiddleware, count=gateway.metrics.count_response)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(PathMiddleware, root_path=config.root_path)
    return app


def _open_store(config: GatewayConfig) -> Store | None:
    if config.store == "none":
        return None
    return Store(open_database(config.store or str(env.default_cache_dir() / "store.db")))
