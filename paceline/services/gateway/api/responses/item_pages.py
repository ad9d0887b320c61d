"""Pages of the list of a response's input items."""

from __future__ import annotations

from collections import Counter
from typing import Any

from paceline.services.gateway.api.batches.pages import Order
from paceline.services.gateway.http.errors import ApiError

Json = dict[str, Any]


def page_of(items: list[Json], order: Order, limit: int, after: str | None) -> Json:
    """Return the JSON object for a page of a list of items, as in OpenAI's API.

    Args:
        items: the whole list, the oldest first.
    """
    items, first = _with_own_ids(items), 0
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ApiError(400, f"after: no item has the id {after!r}", param="after")
        first = ids.index(after) + 1
    page = items[first : first + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": first + limit < len(items)}


def _with_own_ids(items: list[Json]) -> list[Json]:
    """Return the items, each with an id of its own. A page after an id that occurs twice would come again and again.

    The first item with an id keeps it. Clients choose the ids of their items, and send items of earlier turns again.
    """
    known = {item["id"] for item in items}
    seen: set[str] = set()
    times: Counter[str] = Counter()
    found = []
    for item in items:
        own = item_id = item["id"]
        while own in seen or (own != item_id and own in known):
            times[item_id] += 1
            own = f"{item_id}-{times[item_id] + 1}"
        seen.add(own)
        found.append(item if own == item_id else {**item, "id": own})
    return found
