"""Stored responses and conversations, as the routes read and write them: turns the stores' results into API errors."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.api.responses.builder import id_key, response_of_item
from paceline.services.gateway.api.responses.conversation_store import ConversationStore
from paceline.services.gateway.api.responses.conversations import check_items, found
from paceline.services.gateway.api.responses.items import InputItem, ReferenceItem, read_items
from paceline.services.gateway.api.responses.runs import RESTARTED
from paceline.services.gateway.api.responses.schemas import ResponsesRequest
from paceline.services.gateway.api.responses.store import Record, ResponseStore
from paceline.services.gateway.http.bounds import BYTE_COST, RequestMemory
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.planning.media.parts import name_places
from paceline.services.gateway.store.database import StoreError
from paceline.services.gateway.store.store import Check

Json = dict[str, Any]

log = logging.getLogger(__name__)


class KeptResponses:
    """Reads and writes stored responses and conversations for the routes.

    Args:
        store: keeps responses; None if nothing is kept.
        conversations: keeps conversations; None if nothing is kept.
        max_bytes: largest size of the earlier items that a request continues, as JSON.
        max_items: largest number of earlier items that a request continues.

    Methods with an argument `memory` count the size of what they read there, before they read it. They raise
    HTTPException 413 or 429 if there is no room.
    """

    def __init__(
        self,
        store: ResponseStore | None,
        conversations: ConversationStore | None,
        max_bytes: int = 64 << 20,
        max_items: int = 10_000,
    ) -> None:
        self.store = store
        self._conversations = conversations
        self._max_bytes = max_bytes
        self._max_items = max_items

    async def find(self, response_id: str, owner: str) -> Record | None:
        """Return the response with an id; None if the owner has no such response. Raises StoreError."""
        record = await self.store.get(response_id, owner) if self.store is not None else None
        return None if record is None else await self._checked(record)

    async def get(self, response_id: str, owner: str, memory: RequestMemory) -> Record:
        """Return the response with an id. Raises ApiError 404 if the owner has no such response, or StoreError."""
        memory.take(owner, BYTE_COST * await self._size(response_id, owner))
        if (record := await self.find(response_id, owner)) is None:
            raise _not_found(response_id)
        return record

    async def delete(self, response_id: str, owner: str) -> None:
        """Delete the response with an id. Raises ApiError 404 if the owner has no such response, or StoreError."""
        if self.store is None or not await self.store.delete(response_id, owner):
            raise _not_found(response_id)

    async def put(self, response: Json, owner: str, items: list[Json], is_stored: bool) -> None:
        """Keep a response that has ended, and add its items to its conversation, if it has one.

        If the store fails, the response's field `store` becomes false, and the client still gets its answer.

        Args:
            is_stored: whether the response itself is kept.
        """
        assert self.store is not None
        previous = response["previous_response_id"] or ""
        also = self.growth(response, owner, items)
        try:
            if is_stored:
                record = Record(response["id"], owner, previous, response["status"], "", 0.0, response, items)
                await self.store.put(record, also)
            elif also is not None:
                await self.store.write(also)
        except StoreError as error:
            log.error("a response is not kept: %s", error)
            response["store"] = False

    def growth(self, response: Json, owner: str, items: list[Json]) -> Check | None:
        """Return a function that adds a response's input and output to its conversation; None if it has none."""
        if response["conversation"] is None or response["status"] not in ("completed", "incomplete"):
            return None
        assert self._conversations is not None
        return self._conversations.appending(response["conversation"]["id"], owner, [*items, *response["output"]])

    async def conversation(
        self,
        request: ResponsesRequest,
        owner: str,
        memory: RequestMemory,
        run: Callable[..., Awaitable[list[InputItem]]] = asyncio.to_thread,
    ) -> list[InputItem]:
        """Return all items of a request's conversation, with earlier turns, and references replaced by their items.

        Args:
            run: runs a function on a thread.

        Raises ApiError if a response, a conversation or an item is not kept, or StoreError.
        """
        items: list[InputItem] = []
        if (conversation_id := request.conversation_id) is not None:
            items += await run(_read, await self._items(conversation_id, owner, memory), "conversation")
        if request.previous_response_id is not None:
            turns = await self.turns(request.previous_response_id, owner, memory)
            before = [item for turn in turns for item in (*turn.input, *turn.response["output"])]
            if len(before) > self._max_items:
                place, most = "previous_response_id", f"{self._max_items} items (--max-messages)"
                message = f"{place}: the conversation has more than {most}; send its latest items as input"
                raise InvalidRequestError(message, place)
            items += await run(_read, before, "previous_response_id")
        kept: dict[str, dict[str, Json | None]] = {}
        left = self._max_bytes
        for index, item in enumerate(request.input_items):
            if not isinstance(item, ReferenceItem):
                items.append(item)
                continue
            if response_of_item(item.id) not in kept:
                size = await self._size(response_of_item(item.id), owner)
                memory.take(owner, BYTE_COST * size)
                left -= size
                if left < 0:
                    place = f"input[{index}]"
                    message = f"{place}: the responses of all references have more than {self._max_bytes} bytes "
                    raise InvalidRequestError(message + "(--max-conversation-size); refer to fewer", place)
            items.append(await self._find(item, index, owner, kept))
        return items

    async def _size(self, response_id: str, owner: str) -> int:
        """Return the size in bytes of a response and its input as JSON; 0 if the response is not kept."""
        return await self.store.size(response_id, owner) if self.store is not None else 0

    async def _items(self, conversation_id: str, owner: str, memory: RequestMemory) -> list[Json]:
        """Return a conversation's items. Raises ApiError, and InvalidRequestError if it has no room for more items."""
        if self._conversations is None:
            message = "conversation: this server keeps no conversations; start it with --store"
            raise ApiError(400, message, param="conversation")
        conversation = found(await self._conversations.get(conversation_id, owner), conversation_id, "conversation")
        self._conversations.check_room(conversation, [])
        if conversation.size > self._max_bytes:
            most = f"{self._max_bytes} bytes (--max-conversation-size)"
            raise InvalidRequestError(f"conversation: it has more than {most}; begin a new one", "conversation")
        memory.take(owner, BYTE_COST * conversation.size)
        return await self._conversations.items(conversation_id)

    async def turns(self, response_id: str, owner: str, memory: RequestMemory) -> list[Record]:
        """Return a response and all turns before it, the oldest first. Raises ApiError or StoreError."""

        def take(size: int) -> None:
            memory.take(owner, BYTE_COST * size)

        store = self.store
        turns = [] if store is None else await store.conversation(response_id, owner, self._max_bytes, take)
        place = "previous_response_id"
        if not turns:
            hint = "" if self.store is not None else "; this server keeps no responses, so send the whole conversation"
            message = f"Previous response with id {response_id!r} not found{hint}."
            raise ApiError(404, message, param=place, code="previous_response_not_found")
        if missing := turns[0].previous_id:
            message = f"Response with id {missing!r}, an earlier turn of {response_id!r}, is not kept any more."
            raise ApiError(404, message, param=place, code="previous_response_not_found")
        if (await self._checked(turns[-1])).is_running:
            raise InvalidRequestError(f"{place}: this response is not complete yet; wait for it", place)
        return turns

    async def _find(
        self, reference: ReferenceItem, index: int, owner: str, kept: dict[str, dict[str, Json | None]]
    ) -> InputItem:
        """Return the item to which a reference refers.

        Args:
            kept: the items by id of each response that the request has referred to; None for items already taken.

        Raises ApiError if there is no such item, or if the request has it already. Otherwise a short request could
        repeat a long item many times.
        """
        place, response_id = f"input[{index}]", response_of_item(reference.id)
        if response_id not in kept:
            record = await self.store.get(response_id, owner) if self.store is not None else None
            known = [*record.input, *record.response["output"]] if record is not None else []
            kept[response_id] = {item["id"]: item for item in known}
        own = kept[response_id]
        if reference.id not in own:
            raise ApiError(404, f"Item with id {reference.id!r} not found.", param=f"{place}.id")
        found, own[reference.id] = own[reference.id], None
        if found is None:
            message = f"Duplicate item with id {reference.id!r}; refer to each item once."
            raise ApiError(400, message, param=f"{place}.id")
        item = read_items([found])[0]
        name_places(item, place)
        return item

    async def _checked(self, record: Record) -> Record:
        """Return a response; mark it as failed if the gateway that computed it has ended."""
        if not record.is_running or record.runner_until > time.time():
            return record
        assert self.store is not None
        error = {"code": "server_error", "message": RESTARTED}
        failed = {**record.response, "status": "failed", "error": error}
        if not await self.store.finish(failed):  # it has ended meanwhile, or was deleted
            return await self._again(record)
        return dataclasses.replace(record, status="failed", response=failed)

    async def _again(self, record: Record) -> Record:
        """Read a response from the store again and return it. Raises ApiError 404 if it was deleted."""
        assert self.store is not None
        if (found := await self.store.get(record.id, record.owner)) is None:
            raise _not_found(record.id)
        return found


def stored_input(response_id: str, items: Sequence[InputItem]) -> list[Json]:
    """Return the stored form of a response's input, in which each item has an id.

    Raises InvalidRequestError if an item cannot be kept.
    """
    stored = [item.stored(f"{id_key(response_id)}i{number}") for number, item in enumerate(items)]
    check_items(stored, "input")
    return stored


def _read(stored: Sequence[Json], place: str) -> list[InputItem]:
    """Return the items from their stored JSON. Errors name `place`."""
    items = read_items(stored)
    name_places(items, place)
    return items


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id {response_id!r} not found.", param="response_id")
