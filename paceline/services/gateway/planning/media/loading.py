"""Loads the items of one request, makes their expansions for the prompt, and keeps expansions by clients' uuids."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from paceline.core.errors import InvalidRequestError
from paceline.services.common.tasks import end_tasks
from paceline.services.gateway.http.errors import MediaError
from paceline.services.gateway.planning.media.budget import RequestBudget
from paceline.services.gateway.planning.media.items import Expansion, ImageSize, MediaItem, places_of
from paceline.services.gateway.planning.media.loader import MediaLoader, MediaService
from paceline.services.gateway.planning.media.processors.base import OPTIONS_FIELD, PADDING_SECONDS, Processor

_ENTRY_BYTES = 256
"""Memory of an entry besides its inputs, in bytes."""

_NEWEST_AT_ONCE = 8
"""Number of items that are loaded at the same time if only the newest items are needed."""


class RecentMedia:
    """The most recently used expansions of items, up to a size in memory.

    Args:
        max_bytes: largest size of all inputs together. An item that alone is larger is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, Expansion] = OrderedDict()
        self._bytes = 0

    def put(self, key: Hashable, expansion: Expansion) -> None:
        """Keep an expansion under a key, and drop the older one. An expansion that is too large is not kept."""
        self._drop(key)
        size = expansion.size + _ENTRY_BYTES
        if size > self._max_bytes:
            return
        self._kept[key] = expansion
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, key: Hashable) -> Expansion | None:
        """Return the expansion of a key; None if it is not kept, or not any more."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def _drop(self, key: Hashable) -> None:
        old = self._kept.pop(key, None)
        if old is not None:
            self._bytes -= old.size + _ENTRY_BYTES


def without_data(items: Sequence[MediaItem]) -> list[tuple[MediaItem, str, MediaItem | None]]:
    """Return each item that has only a uuid, its name for errors, and the item that the request has sent for this uuid.

    The third value is the last earlier item of the same kind and uuid that has data; None if there is none.
    """
    found = []
    sent: dict[tuple[str, str | None], MediaItem] = {}
    for item, place in zip(items, places_of(items), strict=True):
        name = item.kind, item.uuid
        if item.url is None:
            found.append((item, place, sent.get(name)))
        else:
            sent[name] = item
    return found


def not_kept(item: MediaItem, place: str, param: str) -> InvalidRequestError:
    """Return the error for an item that has only a uuid, if no expansion is kept for the uuid."""
    return InvalidRequestError(
        f"{place}: no {item.kind} with the uuid {item.uuid!r:.80} is kept here, for this API key and these "
        f"{OPTIONS_FIELD}; send the {item.kind} again with its uuid",
        item.place or param,
    )


def recall(
    items: Sequence[MediaItem],
    known: Mapping[MediaItem, Expansion],
    loaded: Mapping[MediaItem, Expansion],
    param: str,
) -> dict[MediaItem, Expansion]:
    """Return the expansions of items that have only a uuid: from the request's own data, else from earlier requests.

    Items whose data were not loaded are left out.

    Args:
        known: the expansions that were kept from earlier requests.
        loaded: the expansions of the request's own items with data.
        param: the field of the request that errors name if they do not know an item's place.

    Raises InvalidRequestError if a uuid stands for two different items of the request, which the prompt could not tell
    apart, or for another item than when the part was stored.
    """
    recalled: dict[MediaItem, Expansion] = {}
    for item, place, sent in without_data(items):
        expansion = known.get(item) if sent is None else loaded.get(sent)
        if expansion is None:
            continue
        name = f"{place}: the uuid {item.uuid!r:.80}"
        if item.digest not in ("", expansion.digest):
            raise InvalidRequestError(
                f"{name} means another {item.kind} now than when this part was stored; send the {item.kind} of that "
                "time again with this uuid, or send the conversation anew",
                item.place or param,
            )
        if recalled.setdefault(item, expansion) != expansion:
            raise InvalidRequestError(
                f"{name} means another {item.kind} earlier in this request; give each {item.kind} a uuid of its own",
                item.place or param,
            )
    return recalled


class ItemLoading:
    """Loads the items of one request. Each item is loaded once, even if it is in the request several times.

    Args:
        budget: counts the media, and afterwards the inputs that were made of them.
        param: the field of the request that errors name if they do not know an item's place.

    Both methods raise InvalidRequestError if the model takes no such item, and the errors of `MediaLoader`.
    """

    def __init__(self, service: MediaService, processor: Processor, budget: RequestBudget, param: str) -> None:
        self._service = service
        self._processor = processor
        self._budget = budget
        self._param = param
        self._loader = MediaLoader(service, budget)

    async def load_all(self, items: Sequence[MediaItem], most_tokens: int | None) -> dict[MediaItem, Expansion]:
        """Load the items that have a URL. Return their expansions.

        Args:
            most_tokens: largest number of placeholder tokens of all items; None if it is not known.
        """
        places: dict[MediaItem, str] = {}
        for item, place in zip(items, places_of(items), strict=True):
            if item.url is not None:
                places.setdefault(item, place)
        room = _Room(most_tokens)
        tasks = [asyncio.create_task(self._load(item, place, room)) for item, place in places.items()]
        try:
            return dict(zip(places, await asyncio.gather(*tasks), strict=True))
        finally:
            await end_tasks(*tasks)

    async def load_newest(
        self, items: Sequence[MediaItem], known: Mapping[MediaItem, Expansion], most_tokens: int | None
    ) -> dict[MediaItem, Expansion]:
        """Load the last items, as many as fit into the prompt. Return the expansions of items that have a URL.

        Args:
            known: the expansions of items that have only a uuid.
            most_tokens: largest number of placeholder tokens of all items; None if it is not known.
        """
        newest = list(dict(zip(items[::-1], places_of(items)[::-1], strict=True)).items())
        fitting: dict[MediaItem, Expansion] = {}
        left = math.inf if most_tokens is None else most_tokens
        for start in range(0, len(newest), _NEWEST_AT_ONCE):
            group = newest[start : start + _NEWEST_AT_ONCE]
            own = [(item, place) for item, place in group if item.url is not None]
            loaded = dict(zip([item for item, _ in own], await self._load_each(own), strict=True))
            for item, place in group:
                if left <= 0:  # What is wrong with an item that has no room does not matter.
                    break
                expansion = loaded[item] if item.url is not None else known.get(item)
                if expansion is None:
                    raise not_kept(item, place, self._param)
                if isinstance(expansion, BaseException):
                    raise expansion
                left -= expansion.tokens
                if left >= 0 and item.url is not None:
                    fitting[item] = expansion
            unused = [each for item, each in loaded.items() if item not in fitting and isinstance(each, Expansion)]
            self._budget.give(sum(each.size for each in unused))
            if left <= 0:
                break
        return fitting

    async def _load_each(self, places: Iterable[tuple[MediaItem, str]]) -> Sequence[Expansion | BaseException]:
        """Load items at the same time. Return for each its expansion, or the error that its loading raised."""
        tasks = [asyncio.create_task(self._load(item, place, _Room(None))) for item, place in places]
        try:
            return await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await end_tasks(*tasks)

    async def _load(self, item: MediaItem, place: str, room: _Room) -> Expansion:
        """Load an item. Return its expansion, whose inputs the budget has counted."""
        assert item.url is not None
        processor = self._processor
        array: NDArray[Any]
        shape: Sequence[int]
        compute: Callable[[], Expansion]
        try:
            match item.kind:
                case "image":
                    fit = _Fit(processor, room)
                    array = await self._loader.image(item.url, place, fit)
                    shape = (*fit.size, 3)
                    compute = partial(processor.image, array, fit.size)
                case "audio":
                    seconds = processor.audio_seconds + PADDING_SECONDS
                    array = await self._loader.audio(item.url, place, seconds)
                    shape = array.shape
                    compute = partial(processor.audio, array)
                case "video":
                    video = await self._loader.video(item.url, place, processor.sampling)
                    array = video.frames
                    shape = array.shape
                    compute = partial(processor.video, list(array), video.timestamps.tolist())
            room.take(processor.tokens_of(item.kind, shape))
            expansion = await self._service.preprocess(compute)
            self._budget.give(array.nbytes)
            self._budget.take(expansion.size)
            return expansion
        except MediaError as error:
            error.param = item.place or self._param
            raise
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{place}: {error}", item.place or self._param) from None


class _Fit:
    """Returns the size to which an image is resized, and refuses an image without room in any context."""

    def __init__(self, processor: Processor, room: _Room) -> None:
        self._processor = processor
        self._room = room
        self.size = (0, 0)
        """Height and width of the image before it is resized."""

    def __call__(self, height: int, width: int) -> ImageSize | None:
        self.size = (height, width)
        self._room.check(self._processor.tokens_of("image", (height, width, 3)))
        return self._processor.fit(height, width)


class _Room:
    """Counts the placeholder tokens of one request's media, which must fit into the model's context.

    Args:
        most_tokens: largest number of placeholder tokens of all media; None is no limit.
    """

    def __init__(self, most_tokens: int | None) -> None:
        self._most = most_tokens
        self._taken = 0

    def take(self, tokens: int) -> None:
        """Count the placeholder tokens of an item. Raises InvalidRequestError if no context has room for it."""
        self.check(tokens)
        self._taken += tokens

    def check(self, tokens: int) -> None:
        """Raise InvalidRequestError if no context has room for the placeholder tokens of an item."""
        if self._most is not None and self._taken + tokens > self._most:
            before = f", and the items before it {self._taken}" if self._taken else ""
            raise InvalidRequestError(
                f"it has at least {tokens} tokens for the model{before}, and the longest context has {self._most}; "
                "send a smaller one, or fewer"
            )
