"""Makes plans and prompts of conversations, after their media have been loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from fastapi import Request

from paceline.services.gateway.api.resume import rendering_time
from paceline.services.gateway.http.event_streams import until_disconnect
from paceline.services.gateway.http.request_scope import aside, scope_of
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.chat_prompt import Prompt, media_of, render_chat
from paceline.services.gateway.planning.media.items import Expansions
from paceline.services.gateway.planning.plan import Plan, ServedModel
from paceline.services.gateway.planning.planning import plan_chat
from paceline.services.gateway.planning.schemas import ChatFields, ChatRequest

T = TypeVar("T")


async def with_media(
    model: ModelFleet,
    chats: Sequence[ChatFields],
    request: Request,
    make: Callable[[Expansions], T],
    param: str = "messages",
    keeps_newest: bool = False,
) -> T:
    """Load the media of chats, and return the result of `make` for their expansions; see `MediaPreparer.plan`.

    The first chat's `mm_processor_kwargs` hold for all. The media count against `--media-memory` until the generation
    runs, or the request ends without a generation.
    """
    items = [item for chat in chats for item in media_of(chat.messages, model.tokenizer)]
    options = chats[0].mm_processor_kwargs
    scope = scope_of(request)
    budget = scope.resources.enter_context(model.media.memory.request())
    most_tokens = model.fleet.max_model_len() * len(chats) or None
    work = model.media_preparer.plan(
        items,
        make,
        budget=budget,
        options=options,
        owner=scope.owner,
        param=param,
        most_tokens=most_tokens,
        keeps_newest=keeps_newest,
        run=partial(aside, request),
    )
    # If a client leaves, its media no longer occupy memory and a process that decodes.
    made: T = await until_disconnect(request.receive, work) if items else await work
    return made


async def plan_with_media(
    model: ModelFleet,
    chats: Sequence[ChatFields],
    request: Request,
    make: Callable[[ServedModel, Expansions], Plan],
    param: str = "messages",
    keeps_newest: bool = False,
) -> Plan:
    """Wait for a ready worker, load the media of chats, and return the plan that `make` returns for them."""
    served = dataclasses.replace(await model.served_model(request), now=rendering_time(request.headers))
    plan = await with_media(model, chats, request, lambda media: make(served, media), param, keeps_newest)
    return await model.constrained(plan, scope_of(request).owner)


async def plan_conversation(model: ModelFleet, chat: ChatRequest, request: Request) -> Plan:
    """Load a chat's media and return its plan. Raises the errors of `plan_chat` and `MediaPreparer.plan`."""
    return await plan_with_media(model, [chat], request, lambda served, media: plan_chat(chat, served, media))


async def encode_conversation(
    model: ModelFleet, chat: ChatFields, request: Request, add_special_tokens: bool = False
) -> Prompt:
    """Load a chat's media and return its prompt. Raises the errors of `render_chat` and `MediaPreparer.plan`."""

    def encode(media: Expansions) -> Prompt:
        return render_chat(chat, model.tokenizer, model.forms).encode(media, model.tokenizer, add_special_tokens)

    return await with_media(model, [chat], request, encode)
