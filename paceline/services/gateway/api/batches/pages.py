"""Pages of a list of files or batches, in order of creation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal, Protocol

from paceline.services.gateway.store.database import Row
from paceline.services.gateway.store.store import Store

Order = Literal["asc", "desc"]


class Listed(Protocol):
    """A file or a batch, as an entry of a list."""

    @property
    def id(self) -> str: ...

    @property
    def created(self) -> float: ...


async def read_page(
    store: Store, query: str, wanted: Mapping[str, str | None], after: Listed | None, limit: int, order: Order
) -> list[Row]:
    """Return at most `limit` rows in order of creation. Raises StoreError.

    Args:
        query: a SELECT with a WHERE clause. Its parameter :now is the present, in seconds since the epoch.
        wanted: the value that each of these columns must have; None allows any.
        after: the entry before the page's first row; None begins with the first row of all.
    """
    fields = {column: value for column, value in wanted.items() if value is not None}
    conditions = [f"{column} = :{column}" for column in fields]
    values = {**fields, "now": time.time(), "limit": limit}
    if after is not None:
        sign = ">" if order == "asc" else "<"
        conditions.append(f"(created {sign} :created OR (created = :created AND id {sign} :id))")
        values |= {"created": after.created, "id": after.id}
    statement = f"{' AND '.join([query, *conditions])} {ordered(order)} LIMIT :limit"
    rows, _ = await store.run(lambda execute: execute(statement, values), writes=False)
    return rows


def ordered(order: Order) -> str:
    """Return the ORDER BY clause for a list in order of creation."""
    return f"ORDER BY created {order.upper()}, id {order.upper()}"
