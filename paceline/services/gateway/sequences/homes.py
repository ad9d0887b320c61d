"""The hosts that computed the latest prompts of each `prompt_cache_key`. Pure."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

MOST_KEYS = 1 << 16
"""Most keys to remember. The one that was used longest ago is forgotten first."""


class Homes:
    """The home of each `prompt_cache_key`: the host that computed the latest prompt with it."""

    def __init__(self) -> None:
        self._hosts: OrderedDict[bytes, str] = OrderedDict()
        """Ids of hosts by digests, because a client's keys may be long."""

    def get(self, owner: str, cache_key: str) -> str:
        """Return the id of a host; "" if the request has no key, or if the key is new.

        Args:
            owner: digest of the client's API key, because clients may choose equal names.
            cache_key: the request's `prompt_cache_key`; "" if it has none.
        """
        return self._hosts.get(_digest(owner, cache_key), "") if cache_key else ""

    def put(self, owner: str, cache_key: str, host_id: str) -> None:
        """Note which host computes a prompt. Nothing happens if the request has no key."""
        if cache_key:
            key = _digest(owner, cache_key)
            self._hosts[key] = host_id
            self._hosts.move_to_end(key)
            if len(self._hosts) > MOST_KEYS:
                self._hosts.popitem(last=False)


def _digest(owner: str, cache_key: str) -> bytes:
    return hashlib.blake2b(f"{owner} {cache_key}".encode(), digest_size=16).digest()
