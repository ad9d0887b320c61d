"""The routes of OpenAI's Conversations API."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.responses.bodies import ConversationBody, DeletedConversation, InputItems, Item
from paceline.services.gateway.api.responses.conversation_store import (
    MAX_ID_CHARACTERS,
    Conversation,
    ConversationStore,
    duplicate_item,
)
from paceline.services.gateway.api.responses.items import InputItem, ReferenceItem
from paceline.services.gateway.api.responses.schemas import Metadata
from paceline.services.gateway.http.bounds import BYTE_COST
from paceline.services.gateway.http.errors import NOT_UNICODE, ApiError, is_unicode_json
from paceline.services.gateway.http.paths import DECISIONS
from paceline.services.gateway.http.request_scope import aside, scope_of
from paceline.services.gateway.planning.media.parts import name_places
from paceline.services.gateway.planning.request_body import Body

MAX_NEW_ITEMS = 20
"""Largest number of items that a client may add at once."""
PATH = "/v1/conversations"

Json = dict[str, Any]
NewItems = Annotated[list[InputItem], Field(max_length=MAX_NEW_ITEMS)]


class CreateConversation(Body):
    """The body of POST /v1/conversations."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class UpdateConversation(Body):
    """The body of POST /v1/conversations/{conversation_id}."""

    metadata: Metadata | None


class AddItems(Body):
    """The body of POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[NewItems, Field(min_length=1)]


def add_conversations(router: APIRouter, store: ConversationStore | None) -> None:
    """Add the routes of conversations to a router.

    Args:
        store: keeps the conversations. If it is None, all routes answer 501.
    """
    if store is None:
        _add_refusals(router)
        return
    api = ConversationsApi(store)
    router.post(PATH, response_model=None, responses=answers(ConversationBody))(api.create)
    router.get(PATH + "/{conversation_id}", response_model=None, responses=answers(ConversationBody))(api.get)
    router.post(PATH + "/{conversation_id}", response_model=None, responses=answers(ConversationBody))(api.update)
    router.delete(PATH + "/{conversation_id}", response_model=None, responses=answers(DeletedConversation))(api.delete)
    router.get(PATH + "/{conversation_id}/items", response_model=None, responses=answers(InputItems))(api.list_items)
    router.post(PATH + "/{conversation_id}/items", response_model=None, responses=answers(InputItems))(api.add_items)
    router.get(PATH + "/{conversation_id}/items/{item_id}", response_model=None, responses=answers(Item))(api.get_item)
    router.delete(
        PATH + "/{conversation_id}/items/{item_id}", response_model=None, responses=answers(ConversationBody)
    )(api.delete_item)


class ConversationsApi:
    """The routes of conversations."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store

    async def _find(self, conversation_id: str, request: Request) -> Conversation:
        return found(await self._store.get(conversation_id, scope_of(request).owner), conversation_id)

    async def create(self, request: Request, body: CreateConversation | None = None) -> Json:
        body = body or CreateConversation()
        made = Conversation(f"conv_{uuid.uuid4().hex}", scope_of(request).owner, time.time(), body.metadata or {})
        items = await aside(request, stored_items, body.items or [])
        self._store.check_room(made, items)
        await self._store.add(made, items)
        return made.to_api()

    async def get(self, conversation_id: str, request: Request) -> Json:
        return (await self._find(conversation_id, request)).to_api()

    async def update(self, conversation_id: str, body: UpdateConversation, request: Request) -> Json:
        await self._find(conversation_id, request)
        await self._store.update(conversation_id, scope_of(request).owner, body.metadata or {})
        return (await self._find(conversation_id, request)).to_api()

    async def delete(self, conversation_id: str, request: Request) -> Json:
        await self._find(conversation_id, request)
        await self._store.delete(conversation_id, scope_of(request).owner)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    async def list_items(
        self,
        conversation_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        await self._find(conversation_id, request)
        items = await self._store.page(conversation_id, after, limit + 1, order, counting(request))
        return await aside(request, lambda: JSONResponse(_page(items[:limit], len(items) > limit)))

    async def add_items(self, conversation_id: str, body: AddItems, request: Request) -> Response:
        await self._find(conversation_id, request)
        items = await aside(request, stored_items, body.items)
        await self._store.append(conversation_id, scope_of(request).owner, items)
        return await aside(request, lambda: JSONResponse(_page(items, has_more=False)))

    async def get_item(self, conversation_id: str, item_id: str, request: Request) -> Response:
        await self._find(conversation_id, request)
        if (item := await self._store.item(conversation_id, item_id, counting(request))) is None:
            raise _no_item(item_id)
        return await aside(request, JSONResponse, item)

    async def delete_item(self, conversation_id: str, item_id: str, request: Request) -> Json:
        conversation = await self._find(conversation_id, request)
        if not await self._store.delete_item(conversation_id, item_id):
            raise _no_item(item_id)
        return conversation.to_api()


def found(conversation: Conversation | None, conversation_id: str, param: str = "conversation_id") -> Conversation:
    """Return a conversation that a store has found. Raises ApiError 404 if the store has found none."""
    if conversation is None:
        message = f"Conversation with id {conversation_id[:80]!r} not found."
        raise ApiError(404, message, param=param, code="conversation_not_found")
    return conversation


def stored_items(items: list[InputItem]) -> list[Json]:
    """Return the stored form of new items. Raises InvalidRequestError if an item cannot be kept."""
    name_places(items, "items")
    for index, item in enumerate(items):
        place = f"items[{index}]"
        if isinstance(item, ReferenceItem):
            raise InvalidRequestError(f"{place}: send the item itself, not a reference to it", place)
        if len(item.id or "") > MAX_ID_CHARACTERS:
            raise InvalidRequestError(f"{place}.id must have at most {MAX_ID_CHARACTERS} characters", f"{place}.id")
    stored = [item.stored(uuid.uuid4().hex) for item in items]
    check_items(stored, "items")
    counts = Counter(item["id"] for item in stored)
    if doubled := next((item_id for item_id, count in counts.items() if count > 1), None):
        raise duplicate_item(doubled)
    return stored


def check_items(items: Sequence[Json], place: str) -> None:
    """Raise InvalidRequestError if a text in an item that would be kept is not valid Unicode.

    Otherwise each answer that lists the item would fail.

    Args:
        place: the field of the API with these items.
    """
    for index, item in enumerate(items):
        if not is_unicode_json(item):
            raise InvalidRequestError(f"{place}[{index}]: a text is {NOT_UNICODE}", f"{place}[{index}]")


def counting(request: Request) -> Callable[[int], None]:
    """Return a function that counts bytes which a request reads from the store. It raises HTTPException 413 or 429."""
    scope = scope_of(request)
    return lambda size: scope.memory.take(scope.owner, BYTE_COST * size)


def _page(items: list[Json], has_more: bool) -> Json:
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": items, **ends, "has_more": has_more}


def _no_item(item_id: str) -> ApiError:
    return ApiError(404, f"Item with id {item_id[:80]!r} not found.", param="item_id")


def _add_refusals(router: APIRouter) -> None:
    async def refuse() -> None:
        message = "this server keeps no conversations; start it with --store"
        raise ApiError(501, message, type="not_implemented")

    for path in (path for path in DECISIONS if path.startswith(PATH)):
        router.add_api_route(path, refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)
