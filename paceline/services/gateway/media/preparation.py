"""From the items of a request to what stands in its prompt: loading, the model's preprocessing, limits."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, get_args

from numpy.typing import NDArray

from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.options import parse_bytes
from paceline.services.common.tasks import end_tasks
from paceline.services.gateway.errors import MediaError
from paceline.services.gateway.media.budget import RequestBudget
from paceline.services.gateway.media.expansion import NO_ITEMS, NOTHING, Expansion, Expansions
from paceline.services.gateway.media.items import ImageSize, ItemKind, MediaItem, places_of
from paceline.services.gateway.media.loader import MediaLoader, MediaService
from paceline.services.gateway.media.processors.base import OPTIONS_FIELD, PADDING_SECONDS, Processor
from paceline.services.gateway.media.recent import RecentMedia, recall, without_data

T = TypeVar("T")
Json = Mapping[str, Any]


class MediaPreparer:
    """Makes what stands in prompts for the items of requests.

    Args:
        processor: the model's preprocessing; None if it takes text alone.
        service: loads items.

    Raises:
        ConfigError: an option is not valid.
    """

    def __init__(self, config: GatewayConfig, processor: Processor | None, service: MediaService) -> None:
        self._service = service
        self._max_items = config.max_media_items
        self._limits = _read_limits(config.limit_mm_per_prompt)
        self._recent = RecentMedia(parse_bytes(config.media_cache_size))
        options = _read_option("--mm-processor-kwargs", config.mm_processor_kwargs)
        if options and processor is None:
            raise ConfigError("--mm-processor-kwargs: this model takes text alone; leave it out")
        try:
            self._processor = processor and processor.with_options(options)
        except InvalidRequestError as error:
            raise ConfigError(f"--mm-processor-kwargs is wrong: {error}") from None

    @property
    def kinds(self) -> frozenset[ItemKind]:
        """The kinds of items that the model takes."""
        return frozenset() if self._processor is None else self._processor.kinds

    async def plan(
        self,
        items: Sequence[MediaItem],
        make: Callable[[Expansions], T],
        *,
        budget: RequestBudget,
        options: Json | None,
        owner: str,
        param: str = "messages",
        most_tokens: int | None = None,
    ) -> T:
        """Return what `make` makes of the request's media. `make` runs in threads.

        It runs twice if there are media, first without them. So an error of the request that has nothing to do with
        its media, such as a text that is too long, comes before anything is fetched.

        Args:
            items: the media of a request, which the model takes.
            budget: counts the media, and afterwards the inputs that were made of them.
            options: the request's `mm_processor_kwargs`.
            owner: who sends the request. Only the same owner can use an item's uuid later.
            param: the field of the request that errors name.
            most_tokens: the most placeholder tokens that the media may have together; None if this is not known.

        Raises:
            InvalidRequestError: an item, an option or a number of items is wrong; or what `make` raises.
            BusyError: too many items are being loaded.
            UnavailableError: the process that decodes cannot be started.
        """
        processor = self._with_options(options)
        if processor is None or not items:
            return await asyncio.to_thread(make, NO_ITEMS)
        self._check_counts(items, param)
        known = self._find_known(items, processor, owner, param)
        await asyncio.to_thread(make, NOTHING)
        for expansion in known.values():
            budget.take(expansion.size)
        room = _Room(budget, most_tokens)
        loaded = await self._load_all(items, processor, room, owner, param)
        return await asyncio.to_thread(make, {**loaded, **recall(items, known, loaded, param)})

    def _with_options(self, options: Json | None) -> Processor | None:
        if not options:
            return self._processor
        if self._processor is None:
            raise InvalidRequestError(f"{OPTIONS_FIELD}: this model takes text alone; leave it out", OPTIONS_FIELD)
        return self._processor.with_options(options)

    def _check_counts(self, items: Sequence[MediaItem], param: str) -> None:
        if len(items) > self._max_items:
            raise InvalidRequestError(
                f"{param}: a request may have at most {self._max_items} images, videos and audio clips "
                f"(--max-media-items), this one has {len(items)}; send fewer",
                param,
            )
        for kind, count in Counter(item.kind for item in items).items():
            if count > self._limits.get(kind, count):
                raise InvalidRequestError(
                    f"{param}: a request may have at most {self._limits[kind]} of the kind {kind} "
                    f"(--limit-mm-per-prompt), this one has {count}; send fewer",
                    param,
                )

    def _find_known(
        self, items: Sequence[MediaItem], processor: Processor, owner: str, param: str
    ) -> dict[MediaItem, Expansion]:
        """Return what is kept of items that have only a uuid, unless the request has their data before them."""
        known = {}
        for item, place, sent in without_data(items):
            if sent is not None:
                continue
            found = self._recent.get(_key(item, processor, owner))
            if found is None:
                raise InvalidRequestError(
                    f"{place}: no {item.kind} with the uuid {item.uuid!r:.80} is kept here, for this API key and these "
                    f"{OPTIONS_FIELD}; send the {item.kind} again with its uuid",
                    param,
                )
            known[item] = found
        return known

    async def _load_all(
        self, items: Sequence[MediaItem], processor: Processor, room: _Room, owner: str, param: str
    ) -> dict[MediaItem, Expansion]:
        """Return what stands in the prompt for items that have a URL. Each is loaded once, however often it comes."""
        places: dict[MediaItem, str] = {}
        for item, place in zip(items, places_of(items), strict=True):
            if item.url is not None:
                places.setdefault(item, place)
        loader = MediaLoader(self._service, room.budget)
        tasks = [
            asyncio.create_task(self._load(loader, room, processor, item, place)) for item, place in places.items()
        ]
        try:
            loaded = dict(zip(places, await asyncio.gather(*tasks), strict=True))
        except InvalidRequestError as error:
            error.param = param
            raise
        finally:
            await end_tasks(*tasks)
        for item in items:
            if item.url is not None and item.uuid is not None:
                self._recent.put(_key(item, processor, owner), loaded[item])
        return loaded

    async def _load(
        self, loader: MediaLoader, room: _Room, processor: Processor, item: MediaItem, place: str
    ) -> Expansion:
        """Return what stands in the prompt for an item, with its inputs counted by the budget."""
        assert item.url is not None
        array: NDArray[Any]
        shape: Sequence[int]
        compute: Callable[[], Expansion]
        try:
            match item.kind:
                case "image":
                    fit = _Fit(processor, room)
                    array = await loader.image(item.url, place, fit)
                    shape = (*fit.size, 3)
                    compute = partial(processor.image, array, fit.size)
                case "audio":
                    seconds = processor.audio_seconds + PADDING_SECONDS
                    array = await loader.audio(item.url, place, seconds)
                    shape = array.shape
                    compute = partial(processor.audio, array)
                case "video":
                    video = await loader.video(item.url, place, processor.sampling)
                    array = video.frames
                    shape = array.shape
                    compute = partial(processor.video, list(array), video.timestamps.tolist())
            room.take(processor.tokens_of(item.kind, shape))
            expansion = await self._service.preprocess(compute)
            room.budget.give(array.nbytes)
            room.budget.take(expansion.size)
            return expansion
        except MediaError:
            raise
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{place}: {error}", place) from None


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
    """The room for the media of one request: in memory, and in the context of the model.

    Args:
        most_tokens: the most placeholder tokens of all media; None is no limit.
    """

    def __init__(self, budget: RequestBudget, most_tokens: int | None) -> None:
        self.budget = budget
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


def _key(item: MediaItem, processor: Processor, owner: str) -> Hashable:
    return owner, item.kind, item.uuid, processor


def _read_limits(text: str) -> dict[str, int]:
    limits = _read_option("--limit-mm-per-prompt", text)
    kinds = get_args(ItemKind)
    if any(kind not in kinds or type(count) is not int or count < 0 for kind, count in limits.items()):
        raise ConfigError(f'--limit-mm-per-prompt must give counts of {", ".join(kinds)}, such as {{"image": 4}}')
    return dict(limits)


def _read_option(name: str, text: str) -> Json:
    """Return the JSON object that is the value of an option; {} if the option is not given."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object")
    return value
