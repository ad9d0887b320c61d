"""The responses that are kept, in an SQL database that several gateways may share.

Each response belongs to the API key with which it was made. The number and size of a key's responses are limited: the
least recently used ones are deleted. A response expires some time after its last use. Using a response also uses every
earlier turn of its conversation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.store.database import Database, Execute, StoreError
from paceline.services.gateway.store.store import Check, Store, Tables

MAX_TURNS = 1000
"""Largest number of turns that a response may continue, itself included."""

Json = dict[str, Any]

_COLUMNS = "id, owner, previous_id, status, runner, runner_until, response, input"
_OTHERS = "FROM paceline_responses WHERE owner = :owner AND id <> :id"


@dataclass(frozen=True, slots=True)
class Record:
    """A response that is kept."""

    id: str
    owner: str
    """Digest of the API key that made it."""
    previous_id: str
    """Id of the response that this one continues; "" if it is the first turn."""
    status: str
    runner: str
    """Name of the gateway that computes the response in the background; "" if no gateway does."""
    runner_until: float
    """Instant from which `runner` counts as ended, unless it moves the instant; in seconds since the epoch."""
    response: Json
    input: list[Json]
    """The input items of this turn."""

    @property
    def is_running(self) -> bool:
        return self.status == "in_progress"


class ResponseStore:
    """Keeps responses by id. All methods raise StoreError if the database cannot be used.

    Args:
        entries: the largest number of responses of one owner.
        max_bytes: largest size of all responses of one owner together.
        seconds: time for which a response is kept after its last use.
    """

    def __init__(self, store: Store, *, entries: int, max_bytes: int, seconds: float) -> None:
        self._store = store
        store.add_tables(_TABLES)
        self._entries = entries
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def put(self, record: Record, also: Check | None = None) -> None:
        """Add a new response. If needed, delete the owner's least recently used ones.

        Args:
            also: a function that writes more in the same transaction; None for nothing more.

        Raises StoreError if the response alone is larger than all responses of an owner may be.
        """

        def put(execute: Execute) -> None:
            texts = json.dumps(record.response), json.dumps(record.input)
            size = sum(map(len, texts))
            if message := self._too_large(size):
                raise StoreError(message)
            now = time.time()
            execute("DELETE FROM paceline_responses WHERE expires < :now", {"now": now})
            self._make_room(execute, record.owner, size, record.id)
            execute(
                f"INSERT INTO paceline_responses ({_COLUMNS}, expires, size) VALUES (:id, :owner, :previous_id, "
                ":status, :runner, :runner_until, :response, :input, :expires, :size)",
                {
                    **{name: getattr(record, name) for name in ("id", "owner", "previous_id", "status", "runner")},
                    "runner_until": record.runner_until,
                    "response": texts[0],
                    "input": texts[1],
                    "expires": now + self._seconds,
                    "size": size,
                },
            )
            if also is not None:
                also(execute)

        await self._store.run(put)

    async def size(self, response_id: str, owner: str) -> int:
        """Return the size in bytes of a response and its input as JSON; 0 if the owner has no such response."""
        query = "SELECT size FROM paceline_responses WHERE id = :id AND owner = :owner"
        rows, _ = await self._store.run(
            lambda execute: execute(query, {"id": response_id, "owner": owner}), writes=False
        )
        return int(rows[0][0]) if rows else 0

    async def write(self, check: Check) -> None:
        """Run a function that writes to the same database, in a transaction."""
        await self._store.run(check)

    async def get(self, response_id: str, owner: str) -> Record | None:
        """Return the response with an id; None if the owner has no such response."""
        return await self._store.run(lambda execute: _get(execute, response_id, owner), writes=False)

    async def conversation(
        self, response_id: str, owner: str, max_bytes: int, take: Callable[[int], object] = lambda size: None
    ) -> list[Record]:
        """Return a response and all turns before it, the oldest first. All of these turns count as used.

        If a turn is not kept any more, the list begins with the turn after it.

        Args:
            max_bytes: the largest size of all turns together as JSON.
            take: is called with the turns' size in bytes before any is read, and may raise an error.

        Raises InvalidRequestError if there are more than MAX_TURNS turns, or more bytes. No turn is read then.
        """

        def find(execute: Execute) -> tuple[list[str], int]:
            ids: list[str] = []
            wanted, left = response_id, max_bytes
            query = "SELECT previous_id, size FROM paceline_responses WHERE id = :id AND owner = :owner"
            query += " AND expires >= :now"
            while wanted:
                rows, _ = execute(query, {"id": wanted, "owner": owner, "now": time.time()})
                if not rows:
                    break
                ids.append(wanted)
                ((wanted, size),) = rows
                left -= size
                if len(ids) > MAX_TURNS or left < 0:
                    place = "previous_response_id"
                    most = f"{MAX_TURNS} turns" if left >= 0 else f"{max_bytes} bytes (--max-conversation-size)"
                    message = f"{place}: the conversation has more than {most}; send its latest items as input"
                    raise InvalidRequestError(message, place)
            return ids[::-1], max_bytes - left

        def read(execute: Execute) -> list[Record]:
            turns: list[Record] = []
            for each in found:
                if (turn := _get(execute, each, owner)) is None:  # it was deleted meanwhile
                    turns.clear()
                else:
                    turns.append(turn)
            return turns

        found, size = await self._store.run(find, writes=False)
        take(size)
        turns = await self._store.run(read, writes=False)
        if turns:
            ids = {f"id{number}": turn.id for number, turn in enumerate(turns)}
            names = ", ".join(f":{name}" for name in ids)
            statement = f"UPDATE paceline_responses SET expires = :expires WHERE id IN ({names})"
            fields = {"expires": time.time() + self._seconds, **ids}
            await self._store.run(lambda execute: execute(statement, fields))
        return turns

    async def finish(self, response: Json, also: Check | None = None) -> bool:
        """Store the final form of a running response. Return False if it has ended already or was deleted.

        If needed, the owner's oldest other responses are deleted.

        Args:
            also: a function that writes more in the same transaction; None for nothing more.

        If the response alone is larger than all responses of an owner may be, it is stored as failed, without output.
        """

        def finish(execute: Execute) -> bool:
            still_runs = "WHERE id = :id AND status = 'in_progress'"
            rows, _ = execute(f"SELECT owner, input FROM paceline_responses {still_runs}", {"id": response["id"]})
            if not rows:
                return False
            ((owner, items),) = rows
            ended, text = response, json.dumps(response)
            if message := self._too_large(size := len(text) + len(items)):
                error = {"code": "server_error", "message": message}
                ended = {**response, "status": "failed", "output": [], "error": error, "incomplete_details": None}
                text = json.dumps(ended)
                size = len(text) + len(items)
            self._make_room(execute, owner, size, response["id"])
            fields = {"id": response["id"], "response": text, "status": ended["status"], "size": size}
            changes = "response = :response, status = :status, runner = '', size = :size"
            has_ended = execute(f"UPDATE paceline_responses SET {changes} {still_runs}", fields)[1] > 0
            if has_ended and also is not None:
                also(execute)
            return has_ended

        return await self._store.run(finish)

    async def keep_alive(self, runner: str, until: float, running: Collection[str]) -> set[str]:
        """Renew a gateway's sign of life for the responses in `running`. Return the ids of those that are to go on.

        A response of the gateway that is not in `running`, because the answer to an earlier call was lost, soon counts
        as failed.
        """

        def keep(execute: Execute) -> set[str]:
            statement = "UPDATE paceline_responses SET runner_until = :until WHERE id = :id AND runner = :runner"
            fields = {"runner": runner, "until": until}
            return {each for each in sorted(running) if execute(statement, {**fields, "id": each})[1]}

        return await self._store.run(keep)

    async def delete(self, response_id: str, owner: str) -> bool:
        """Delete the response with an id. Return False if the owner has no such response."""
        statement = "DELETE FROM paceline_responses WHERE id = :id AND owner = :owner AND expires >= :now"
        fields = {"id": response_id, "owner": owner, "now": time.time()}
        return await self._store.run(lambda execute: execute(statement, fields)[1] > 0)

    def _too_large(self, size: int) -> str:
        """Return an error message if a response is larger than all responses of an owner may be; else ""."""
        if size <= self._max_bytes:
            return ""
        return f"the response has {size} bytes, but only {self._max_bytes} are kept for each API key"

    def _make_room(self, execute: Execute, owner: str, size: int, response_id: str) -> None:
        """Delete the oldest responses of an owner until one more of `size` bytes has room.

        The response `response_id` itself does not count, if it is stored already.
        """
        fields: Mapping[str, Any] = {"owner": owner, "id": response_id}
        ((entries, total),), _ = execute(f"SELECT COUNT(*), COALESCE(SUM(size), 0) {_OTHERS}", fields)
        while entries >= self._entries or total + size > self._max_bytes:
            oldest, _ = execute(f"SELECT id, size {_OTHERS} ORDER BY expires LIMIT 100", fields)
            # Another gateway may have deleted some since they were counted.
            if not oldest:
                return
            for evicted, its_size in oldest:
                if entries < self._entries and total + size <= self._max_bytes:
                    break
                execute("DELETE FROM paceline_responses WHERE id = :id", {"id": evicted})
                entries, total = entries - 1, total - its_size


def _get(execute: Execute, response_id: str, owner: str) -> Record | None:
    statement = f"SELECT {_COLUMNS} FROM paceline_responses WHERE id = :id AND owner = :owner AND expires >= :now"
    rows, _ = execute(statement, {"id": response_id, "owner": owner, "now": time.time()})
    if not rows:
        return None
    found, owner, previous_id, status, runner, runner_until, response, items = rows[0]
    return Record(found, owner, previous_id, status, runner, runner_until, json.loads(response), json.loads(items))


def _statements(database: Database) -> list[str]:
    return [
        "CREATE TABLE paceline_responses (id VARCHAR(64) PRIMARY KEY, owner VARCHAR(64) NOT NULL, "
        "previous_id VARCHAR(64) NOT NULL, status VARCHAR(16) NOT NULL, runner VARCHAR(128) NOT NULL, "
        f"runner_until DOUBLE PRECISION NOT NULL, response {database.text} NOT NULL, "
        f"input {database.text} NOT NULL, expires DOUBLE PRECISION NOT NULL, size BIGINT NOT NULL)",
        "CREATE INDEX paceline_responses_owner ON paceline_responses (owner, expires, size)",
        "CREATE INDEX paceline_responses_expires ON paceline_responses (expires)",
        "CREATE INDEX paceline_responses_runner ON paceline_responses (runner)",
    ]


_TABLES = Tables(["paceline_responses"], _statements)
