"""Loads the items of one request, and makes what stands in its prompt for them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from paceline.core.errors import InvalidRequestError
from paceline.services.common.tasks import end_tasks
from paceline.services.gateway.http.errors import MediaError
from paceline.services.gateway.planning.media.budget import RequestBudget
from paceline.services.gateway.planning.media.expansion import Expansion
from paceline.services.gateway.planning.media.items import ImageSize, MediaItem, places_of
from paceline.services.gateway.planning.media.loader import MediaLoader, MediaService
from paceline.services.gateway.planning.media.processors.base import PADDING_SECONDS, Processor
from paceline.services.gateway.planning.media.recent import not_kept

_NEWEST_AT_ONCE = 8
"""Items that are loaded at the same time if only the newest ones are needed."""


class ItemLoading:
    """Loads the items of one request. Each is loaded once, however often it comes.

    Args:
        budget: counts the media, and afterwards the inputs that were made of them.
        param: the field of the request that errors name if they do not know an item's place.

    Both methods raise InvalidRequestError if an item is wrong, and the errors of `MediaLoader`.
    """

    def __init__(self, service: MediaService, processor: Processor, budget: RequestBudget, param: str) -> None:
        self._service = service
        self._processor = processor
        self._budget = budget
        self._param = param
        self._loader = MediaLoader(service, budget)

    async def load_all(self, items: Sequence[MediaItem], most_tokens: int | None) -> dict[MediaItem, Expansion]:
        """Return what stands in the prompt for items that have a URL.

        Args:
            most_tokens: the most placeholder tokens that they may have together; None if this is not known.
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
        """Return what stands in the prompt for the last items that have a URL, as many as there is room for.

        Args:
            known: what stands in the prompt for items that have none.
            most_tokens: the room in placeholder tokens; None if this is not known.
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
        """Return what stands in the prompt for each item, or what is wrong with it."""
        tasks = [asyncio.create_task(self._load(item, place, _Room(None))) for item, place in places]
        try:
            return await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await end_tasks(*tasks)

    async def _load(self, item: MediaItem, place: str, room: _Room) -> Expansion:
        """Return what stands in the prompt for an item, with its inputs counted by the budget."""
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
    """Says to which size an image is resized, and refuses it if no context has room for it. Remembers its size."""

    def __init__(self, processor: Processor, room: _Room) -> None:
        self._processor = processor
        self._room = room
        self.size = (0, 0)
        """Height and width."""

    def __call__(self, height: int, width: int) -> ImageSize | None:
        self.size = (height, width)
        self._room.check(self._processor.tokens_of("image", (height, width, 3)))
        return self._processor.fit(height, width)


class _Room:
    """The room for the media of one request in the context of the model.

    Args:
        most_tokens: the most placeholder tokens of all media; None is no limit.
    """

    def __init__(self, most_tokens: int | None) -> None:
        self._most = most_tokens
        self._taken = 0

    def take(self, tokens: int) -> None:
        """Count the placeholder tokens of an item. Raises InvalidRequestError if no context has room for them."""
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
