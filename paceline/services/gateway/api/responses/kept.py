"""The responses of a gateway that clients may come back to: what the routes ask the store, with the API's errors."""

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
from paceline.services.gateway.api.responses.conversations import found
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
    """The responses that are kept.

    Args:
        store: None if nothing is kept.
        conversations: None if nothing is kept.
        max_bytes: the largest size of the items that a request continues, as JSON.
        max_items: the most items that a request continues.

    Methods that read what may be large count its memory in `memory` before. They raise HTTPException 413 or 429 if
    there is no room.
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
        """Return a response; None if there is none. Raises StoreError."""
        record = await self.store.get(response_id, owner) if self.store is not None else None
        return None if record is None else await self._checked(record)

    async def get(self, response_id: str, owner: str, memory: RequestMemory) -> Record:
        """Return a response. Raises ApiError 404 if there is none, or StoreError."""
        memory.take(owner, BYTE_COST * await self._size(response_id, owner))
        if (record := await self.find(response_id, owner)) is None:
            raise _not_found(response_id)
        return record

    async def delete(self, response_id: str, owner: str) -> None:
        """Delete a response. Raises ApiError 404 if there is none, or StoreError."""
        if self.store is None or not await self.store.delete(response_id, owner):
            raise _not_found(response_id)

    async def put(self, response: Json, owner: str, items: list[Json], is_stored: bool) -> None:
        """Keep a response that has ended, and add its items to its conversation, if it has one.

        If that fails, its field `store` says so, and the client has its answer.

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
        """Return what adds the input and output of a response to its conversation; None if nothing does."""
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
        """Return all items of a request's conversation, those of earlier turns and references included.

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
        """Return the size of a response as JSON, with its input; 0 if it is not kept."""
        return await self.store.size(response_id, owner) if self.store is not None else 0

    async def _items(self, conversation_id: str, owner: str, memory: RequestMemory) -> list[Json]:
        """Return the items of a conversation, which has room for more. Raises ApiError, InvalidRequestError."""
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
        """Return a response and all turns before it, the first one first. Raises ApiError or StoreError."""

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
        """Return the item with an id.

        Args:
            kept: the items of each response that the request has referred to, by their ids; None for those that it has
                taken.

        Raises ApiError if there is none, or the request has it already: else a short request could repeat a long item
        many times.
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
        """Return a response, as failed if the gateway that computed it has ended."""
        if not record.is_running or record.runner_until > time.time():
            return record
        assert self.store is not None
        error = {"code": "server_error", "message": RESTARTED}
        failed = {**record.response, "status": "failed", "error": error}
        if not await self.store.finish(failed):  # it has ended meanwhile, or was deleted
            return await self._again(record)
        return dataclasses.replace(record, status="failed", response=failed)

    async def _again(self, record: Record) -> Record:
        """Return a response as it is kept now. Raises ApiError 404 if it was deleted."""
        assert self.store is not None
        if (found := await self.store.get(record.id, record.owner)) is None:
            raise _not_found(record.id)
        return found


def stored_input(response_id: str, items: Sequence[InputItem]) -> list[Json]:
    """Return the input of a response as it is kept: each item has an id."""
    return [item.stored(f"{id_key(response_id)}i{number}") for number, item in enumerate(items)]


def _read(stored: Sequence[Json], place: str) -> list[InputItem]:
    """Return stored items, whose errors name `place`."""
    items = read_items(stored)
    name_places(items, place)
    return items


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id {response_id!r} not found.", param="response_id")
