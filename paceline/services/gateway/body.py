"""How bodies of requests are read."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    # Strict: "5" is no number and true is no token.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())
