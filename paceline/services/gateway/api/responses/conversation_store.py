"""The conversations that are kept, in the SQL database of the responses.

Each conversation belongs to the API key with which it was made. The number and size of a key's conversations are
limited: the least recently used ones are deleted. A conversation expires some time after its last use.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.store.database import Database, Execute
from paceline.services.gateway.store.store import Check, Store, Tables

MAX_ID_CHARACTERS = 255
"""Largest number of characters of an item's id."""
MAX_ITEMS = 10_000
"""Largest number of items of a conversation. One response may exceed this number."""

Json = dict[str, Any]

_COLUMNS = "id, owner, created, metadata, entries, size"
_OWN = "id = :id AND owner = :owner AND expires >= :now"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation without its items."""

    id: str
    owner: str
    """Digest of the API key that made it."""
    created: float
    """Instant at which the conversation was made, in seconds since the epoch."""
    metadata: Json
    entries: int = 0
    """Number of items that were ever added, deleted ones included."""
    size: int = 0
    """Size in bytes of all items that were ever added, as JSON, deleted ones included."""

    def to_api(self) -> Json:
        """Return the conversation as the JSON object of OpenAI's API."""
        created = int(self.created)
        return {"id": self.id, "object": "conversation", "created_at": created, "metadata": self.metadata}


class ConversationStore:
    """Keeps conversations by id. All methods raise StoreError if the database cannot be used.

    Args:
        entries: the largest number of conversations of one owner.
        max_bytes: largest size of all conversations of one owner together.
        seconds: time for which a conversation is kept after its last use.
    """

    def __init__(self, store: Store, *, entries: int, max_bytes: int, seconds: float) -> None:
        self._store = store
        store.add_tables(_TABLES)
        self._entries = entries
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def add(self, conversation: Conversation, items: Sequence[Json]) -> None:
        """Add a conversation with its first items. If needed, delete the owner's least recently used ones."""

        def add(execute: Execute) -> None:
            now = time.time()
            expired, _ = execute("SELECT id FROM paceline_conversations WHERE expires < :now", {"now": now})
            for (each,) in expired:
                _delete(execute, each)
            fields = {name: getattr(conversation, name) for name in ("id", "owner", "created")}
            execute(
                f"INSERT INTO paceline_conversations ({_COLUMNS}, expires) VALUES "
                "(:id, :owner, :created, :metadata, 0, 0, :expires)",
                {**fields, "metadata": json.dumps(conversation.metadata), "expires": now + self._seconds},
            )
            self._append(execute, conversation.id, conversation.owner, items)

        await self._store.run(add)

    async def get(self, conversation_id: str, owner: str) -> Conversation | None:
        """Return the conversation with an id; None if the owner has no such conversation."""
        return await self._store.run(lambda execute: _get(execute, conversation_id, owner), writes=False)

    async def update(self, conversation_id: str, owner: str, metadata: Json) -> None:
        """Replace the metadata of a conversation, if the owner has it."""
        fields = _own(conversation_id, owner) | {"metadata": json.dumps(metadata)}
        statement = f"UPDATE paceline_conversations SET metadata = :metadata WHERE {_OWN}"
        await self._store.run(lambda execute: execute(statement, fields))

    async def delete(self, conversation_id: str, owner: str) -> None:
        """Delete a conversation with its items, if the owner has it."""

        def delete(execute: Execute) -> None:
            if _get(execute, conversation_id, owner) is not None:
                _delete(execute, conversation_id)

        await self._store.run(delete)

    async def append(self, conversation_id: str, owner: str, items: Sequence[Json]) -> None:
        """Add items at the end. Raises InvalidRequestError if they have no room, or an id is used already."""

        def append(execute: Execute) -> None:
            found = _get(execute, conversation_id, owner)
            if found is not None:
                self.check_room(found, items)
                if known := _known_ids(execute, conversation_id, items):
                    raise duplicate_item(min(known))
            self._append(execute, conversation_id, owner, items)

        await self._store.run(append)

    def appending(self, conversation_id: str, owner: str, items: Sequence[Json]) -> Check:
        """Return a function that adds items at the end, inside a transaction of the caller.

        The function does nothing if the conversation was deleted meanwhile.
        """
        return lambda execute: self._append(execute, conversation_id, owner, items)

    def check_room(self, conversation: Conversation, items: Sequence[Json]) -> None:
        """Raise InvalidRequestError if a conversation has no room for further items."""
        size = conversation.size + sum(len(json.dumps(item)) for item in items)
        if conversation.entries + len(items) > MAX_ITEMS or size > self._max_bytes:
            most = f"at most {MAX_ITEMS} items and {self._max_bytes} bytes"
            raise InvalidRequestError(f"conversation: a conversation has {most}; begin a new one", "conversation")

    async def items(self, conversation_id: str) -> list[Json]:
        """Return all items of a conversation, which counts as a use of it."""

        def read(execute: Execute) -> list[Json]:
            fields = {"id": conversation_id, "expires": time.time() + self._seconds}
            execute("UPDATE paceline_conversations SET expires = :expires WHERE id = :id", fields)
            query = "SELECT item FROM paceline_conversation_items WHERE conversation_id = :id ORDER BY number"
            rows, _ = execute(query, {"id": conversation_id})
            return [json.loads(text) for (text,) in rows]

        return await self._store.run(read)

    async def page(
        self,
        conversation_id: str,
        after: str | None,
        limit: int,
        order: Literal["asc", "desc"],
        take: Callable[[int], None],
    ) -> list[Json]:
        """Return at most `limit` items of a conversation, in the wanted order.

        Args:
            take: is called with the size in bytes before the items are read, and may raise an error.
            after: id of the item before the page's first one; None begins with the first item of all.

        Raises InvalidRequestError if there is no item `after`.
        """

        def read(execute: Execute) -> list[Json]:
            where, fields = "conversation_id = :id", {"id": conversation_id, "limit": limit}
            if after is not None:
                query = f"SELECT number FROM paceline_conversation_items WHERE {where} AND item_id = :after"
                rows, _ = execute(query, {"id": conversation_id, "after": after})
                if not rows:
                    raise InvalidRequestError(f"after: no item has the id {after!r}", "after")
                where += f" AND number {'>' if order == 'asc' else '<'} :number"
                fields["number"] = rows[0][0]
            items = f"FROM paceline_conversation_items WHERE {where} ORDER BY number {order} LIMIT :limit"
            (((size,),), _) = execute(f"SELECT SUM(LENGTH(item)) FROM (SELECT item {items}) AS page", fields)
            take(int(size or 0))
            rows, _ = execute(f"SELECT item {items}", fields)
            return [json.loads(text) for (text,) in rows]

        return await self._store.run(read, writes=False)

    async def item(self, conversation_id: str, item_id: str, take: Callable[[int], None]) -> Json | None:
        """Return one item of a conversation; None if there is none. `take` is that of `page`."""

        def read(execute: Execute) -> Json | None:
            found = "FROM paceline_conversation_items WHERE conversation_id = :id AND item_id = :item"
            fields = {"id": conversation_id, "item": item_id}
            sizes, _ = execute(f"SELECT SUM(LENGTH(item)) {found}", fields)
            take(int(sizes[0][0] or 0))
            rows, _ = execute(f"SELECT item {found}", fields)
            return json.loads(rows[0][0]) if rows else None

        return await self._store.run(read, writes=False)

    async def delete_item(self, conversation_id: str, item_id: str) -> bool:
        """Delete an item of a conversation. Return False if there is none."""
        statement = "DELETE FROM paceline_conversation_items WHERE conversation_id = :id AND item_id = :item"
        fields = {"id": conversation_id, "item": item_id}
        return await self._store.run(lambda execute: execute(statement, fields)[1] > 0)

    def _append(self, execute: Execute, conversation_id: str, owner: str, items: Sequence[Json]) -> None:
        texts = [json.dumps(item) for item in items]
        grown = {"entries": len(texts), "size": sum(map(len, texts)), "expires": time.time() + self._seconds}
        changes = "entries = entries + :entries, size = size + :size, expires = :expires"
        # This locks the row, so that two responses of one conversation do not take the same numbers.
        statement = f"UPDATE paceline_conversations SET {changes} WHERE {_OWN}"
        if not execute(statement, _own(conversation_id, owner) | grown)[1]:
            return
        found = _get(execute, conversation_id, owner)
        assert found is not None
        known = _known_ids(execute, conversation_id, items)
        for number, (item, text) in enumerate(zip(items, texts, strict=True), found.entries - len(texts)):
            item_id = item["id"]
            if item_id in known:  # a response has it in its input; a page after it would begin at the first one
                item_id = f"item_{uuid.uuid4().hex}"
                text = json.dumps({**item, "id": item_id})
            known.add(item_id)
            execute(
                "INSERT INTO paceline_conversation_items (conversation_id, number, item_id, item) "
                "VALUES (:id, :number, :item_id, :item)",
                {"id": conversation_id, "number": number, "item_id": item_id[:MAX_ID_CHARACTERS], "item": text},
            )
        self._make_room(execute, conversation_id, owner)

    def _make_room(self, execute: Execute, conversation_id: str, owner: str) -> None:
        """Delete the owner's least recently used conversations until the rest is within the limits."""
        query = "SELECT id, size FROM paceline_conversations WHERE owner = :owner ORDER BY expires DESC"
        rows, _ = execute(query, {"owner": owner})
        own = next(size for each, size in rows if each == conversation_id)
        entries, total = 1, own
        for each, size in rows:
            if each == conversation_id:
                continue
            entries, total = entries + 1, total + size
            if entries > self._entries or total > self._max_bytes:
                _delete(execute, each)


def _own(conversation_id: str, owner: str) -> Json:
    return {"id": conversation_id, "owner": owner, "now": time.time()}


def _get(execute: Execute, conversation_id: str, owner: str) -> Conversation | None:
    query = f"SELECT {_COLUMNS} FROM paceline_conversations WHERE {_OWN}"
    rows, _ = execute(query, _own(conversation_id, owner))
    if not rows:
        return None
    found, owner, created, metadata, entries, size = rows[0]
    return Conversation(found, owner, created, json.loads(metadata), entries, size)


def _known_ids(execute: Execute, conversation_id: str, items: Sequence[Json]) -> set[str]:
    """Return the ids of those given items that a conversation has already."""
    query = "SELECT item_id FROM paceline_conversation_items WHERE conversation_id = :id"
    there = {item_id for (item_id,) in execute(query, {"id": conversation_id})[0]}
    return {item["id"] for item in items if item["id"][:MAX_ID_CHARACTERS] in there}


def duplicate_item(item_id: str) -> InvalidRequestError:
    message = f"items: the conversation has an item with the id {item_id[:80]!r} already; send another id, or none"
    return InvalidRequestError(message, "items")


def _delete(execute: Execute, conversation_id: str) -> None:
    execute("DELETE FROM paceline_conversation_items WHERE conversation_id = :id", {"id": conversation_id})
    execute("DELETE FROM paceline_conversations WHERE id = :id", {"id": conversation_id})


def _statements(database: Database) -> list[str]:
    return [
        "CREATE TABLE paceline_conversations (id VARCHAR(64) PRIMARY KEY, owner VARCHAR(64) NOT NULL, "
        f"created DOUBLE PRECISION NOT NULL, metadata {database.text} NOT NULL, entries INTEGER NOT NULL, "
        "size BIGINT NOT NULL, expires DOUBLE PRECISION NOT NULL)",
        "CREATE INDEX paceline_conversations_owner ON paceline_conversations (owner, expires)",
        "CREATE INDEX paceline_conversations_expires ON paceline_conversations (expires)",
        "CREATE TABLE paceline_conversation_items (conversation_id VARCHAR(64) NOT NULL, number INTEGER NOT NULL, "
        f"item_id VARCHAR(255) NOT NULL, item {database.text} NOT NULL, PRIMARY KEY (conversation_id, number))",
    ]


_TABLES = Tables(["paceline_conversations", "paceline_conversation_items"], _statements)
