"""The rule for web pages of other origins that call the API from a browser (CORS)."""

from __future__ import annotations

import re
from typing import Any

from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError
from paceline.core.options import listed

_SHOWN = (
    "retry-after",
    "x-request-id",
    "x-schema-unenforced",
    *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
)
"""Headers of responses that a web page may read."""


def cors_options(config: GatewayConfig) -> dict[str, Any] | None:
    """Return the arguments of starlette's CORSMiddleware; None if no other origin is allowed.

    Raises ConfigError if an entry is no origin, or if pages of any origin could use keys that browsers keep.
    """
    origins = listed(config.allowed_origins)
    if not origins:
        return None
    for origin in origins:
        # Desktop applications have pages of schemes of their own, such as app://NAME.
        if origin != "*" and re.fullmatch(r'[A-Za-z][A-Za-z0-9+.-]*://[^/"\s]+', origin) is None:
            raise ConfigError(
                f"--allowed-origins: {origin!r} is no origin; write https://chat.example.com, several with commas, or *"
            )
    if config.allow_credentials and "*" in origins:
        raise ConfigError("--allow-credentials needs named origins in --allowed-origins, because * is every web page")
    return {
        "allow_origins": origins,
        "allow_methods": listed(config.allowed_methods),
        "allow_headers": listed(config.allowed_headers),
        "allow_credentials": config.allow_credentials,
        "expose_headers": _SHOWN,
    }
