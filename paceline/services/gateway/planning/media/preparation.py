"""Preparation of a request's items for its prompt: loading, the model's preprocessing, limits."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.options import parse_bytes
from paceline.services.gateway.planning.media.budget import RequestBudget
from paceline.services.gateway.planning.media.items import NO_ITEMS, NOTHING, Expansion, Expansions, ItemKind, MediaItem
from paceline.services.gateway.planning.media.loader import MediaService
from paceline.services.gateway.planning.media.loading import ItemLoading, RecentMedia, not_kept, recall, without_data
from paceline.services.gateway.planning.media.processors.base import OPTIONS_FIELD, Processor

T = TypeVar("T")
Json = Mapping[str, Any]


class MediaPreparer:
    """Makes the expansions of requests' items for their prompts.

    Args:
        processor: the model's preprocessing; None if the model takes text alone.
        service: loads items.

    Raises:
        ConfigError: a media option of the gateway is not valid.
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
        keeps_newest: bool = False,
        run: Callable[..., Awaitable[T]] = asyncio.to_thread,
    ) -> T:
        """Load a request's media, and return the result of `make` for their expansions. `make` runs in threads.

        If there are media, `make` runs twice, first with empty expansions. So an error of the request that has nothing
        to do with its media, such as a text that is too long, is raised before anything is fetched.

        Args:
            items: the media of a request, all of kinds that the model takes.
            budget: counts the media, and afterwards the inputs that were made of them.
            options: the request's `mm_processor_kwargs`.
            owner: the owner of the request's key. Only the same owner can use an item's uuid later.
            param: the field of the request that errors name if they do not concern a single item.
            most_tokens: largest number of placeholder tokens of all media together; None if it is not known.
            keeps_newest: whether items above a limit are left out, the oldest first; otherwise they are an error.
            run: runs a function on a thread.

        Raises:
            InvalidRequestError: an item, an option or a number of items is wrong; or `make` raises it.
            BusyError: too many items are being loaded.
            UnavailableError: the process that decodes cannot be started.
        """
        processor = self._with_options(options)
        if processor is None or not items:
            return await run(make, NO_ITEMS)
        wanted = self._newest(items) if keeps_newest else items
        self._check_counts(wanted, param)
        known = self._find_known(wanted, processor, owner)
        if not keeps_newest:
            for item, place, sent in without_data(wanted):
                if sent is None and item not in known:
                    raise not_kept(item, place, param)
        await run(make, NOTHING)
        for expansion in known.values():
            budget.take(expansion.size)
        loading = ItemLoading(self._service, processor, budget, param)
        if keeps_newest:
            loaded = await loading.load_newest(wanted, known, most_tokens)
        else:
            loaded = await loading.load_all(wanted, most_tokens)
        for item in items:
            if item.uuid is not None and item in loaded:
                self._recent.put(_key(item, processor, owner), loaded[item])
        return await run(make, {**loaded, **recall(items, known, loaded, param)})

    def _with_options(self, options: Json | None) -> Processor | None:
        if not options:
            return self._processor
        if self._processor is None:
            raise InvalidRequestError(f"{OPTIONS_FIELD}: this model takes text alone; leave it out", OPTIONS_FIELD)
        return self._processor.with_options(options)

    def _newest(self, items: Sequence[MediaItem]) -> list[MediaItem]:
        """Return the last items, as many as the limits allow. An item with only a uuid counts as the earlier one."""
        whole: list[MediaItem] = []
        sent: dict[tuple[str, str | None], MediaItem] = {}
        for item in items:
            if item.url is not None:
                sent[item.kind, item.uuid] = item
            whole.append(sent.get((item.kind, item.uuid), item) if item.url is None else item)
        kept: Counter[str] = Counter()
        for start in range(len(whole), max(0, len(whole) - self._max_items), -1):
            kind = whole[start - 1].kind
            kept[kind] += 1
            if kept[kind] > self._limits.get(kind, kept[kind]):
                return whole[start:]
        return whole[-self._max_items :] if self._max_items else []

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

    def _find_known(self, items: Sequence[MediaItem], processor: Processor, owner: str) -> dict[MediaItem, Expansion]:
        """Return the kept expansions of items that have only a uuid and whose data is not earlier in the request."""
        wanted = [item for item, _, sent in without_data(items) if sent is None]
        found = {item: self._recent.get(_key(item, processor, owner)) for item in wanted}
        return {item: expansion for item, expansion in found.items() if expansion is not None}


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
