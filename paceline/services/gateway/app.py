"""The gateway as an ASGI application."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI

import paceline
from paceline.core import env
from paceline.services.gateway.api import make_api
from paceline.services.gateway.api_schema import ERRORS, add_chunks
from paceline.services.gateway.errors import install_error_handlers
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.middleware import ApiKeyMiddleware, BodyLimitMiddleware, RequestIdMiddleware
from paceline.services.gateway.operations import make_operations
from paceline.services.gateway.scaling import make_scaling


def create_app(gateway: Gateway) -> FastAPI:
    """Return an application that starts `gateway` when it starts, and closes it when it ends."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.close()

    config = gateway.config
    app = FastAPI(
        title="Paceline",
        version=paceline.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ERRORS,
        # We make our own spans and metrics. A second set would cost as much as all else that comes before placement.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    add_chunks(app)
    install_error_handlers(app)
    app.include_router(make_api(gateway))
    app.include_router(make_operations(gateway))
    app.include_router(make_scaling(gateway))
    # The middleware that is added last sees a request first.
    if keys := _keys(config.api_key) or env.api_keys():
        app.add_middleware(ApiKeyMiddleware, keys=keys)
    app.add_middleware(BodyLimitMiddleware, max_bytes=config.max_body_bytes)
    app.add_middleware(RequestIdMiddleware)
    return app


def _keys(listed: str) -> tuple[str, ...]:
    return tuple(key.strip() for key in listed.split(",") if key.strip())
