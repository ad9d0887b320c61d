"""Prepared items that clients have sent lately, by the names that clients gave them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.planning.media.expansion import Expansion
from paceline.services.gateway.planning.media.items import MediaItem, places_of
from paceline.services.gateway.planning.media.processors.base import OPTIONS_FIELD

_ENTRY_BYTES = 256
"""What an entry takes besides its inputs."""


class RecentMedia:
    """The most recently used expansions of items, within a size.

    Args:
        max_bytes: the size of all inputs together. A larger item is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, Expansion] = OrderedDict()
        self._bytes = 0

    def put(self, key: Hashable, expansion: Expansion) -> None:
        """Keep an expansion in place of an older one with the same key. If it is too large, only the older one goes."""
        self._drop(key)
        size = expansion.size + _ENTRY_BYTES
        if size > self._max_bytes:
            return
        self._kept[key] = expansion
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, key: Hashable) -> Expansion | None:
        """Return an expansion; None if it is not kept any more."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def _drop(self, key: Hashable) -> None:
        old = self._kept.pop(key, None)
        if old is not None:
            self._bytes -= old.size + _ENTRY_BYTES


def without_data(items: Sequence[MediaItem]) -> list[tuple[MediaItem, str, MediaItem | None]]:
    """Return the items that have only a uuid, and their places.

    The third value of each is the last item before it that has data, the same kind and the same uuid, if there is one.
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
    """Return the error of an item that has only a uuid, of which nothing is kept."""
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
    """Return what stands in the prompt for items that have only a uuid: what the request has sent, or what was kept.

    Items whose data were not loaded are left out.

    Raises InvalidRequestError if a uuid means two different items, because the prompt has one entry for both, or if a
    stored one has got another meaning.
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
