"""The scope of a request that no middleware has seen."""

from __future__ import annotations

from typing import Any

from paceline.core.config.http import HttpOptions
from paceline.services.gateway.http.bounds import BodyMemory, Bounds, RequestMemory
from paceline.services.gateway.http.fair_pool import FairPool
from paceline.services.gateway.http.request_scope import RequestScope


def toy_scope(request_id: str = "r", **fields: Any) -> RequestScope:
    """Return the scope of a request with the given fields."""
    fields = {"client_chose_id": True, "send": None} | fields
    bounds, memory = Bounds.of(HttpOptions()), RequestMemory(BodyMemory(1 << 20))
    return RequestScope(id=request_id, pool=FairPool(1), bounds=bounds, memory=memory, **fields)
