"""Which hosts have the encoding of an image, a frame or audio, or compute it now, as far as this gateway knows."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from paceline.core.media import MediaSpan
from paceline.services.gateway.prefix_index import PrefixIndex


class EncodingIndex:
    """The encodings of all hosts. A hint.

    Args:
        prefixes: the cached blocks of all hosts.
    """

    def __init__(self, prefixes: PrefixIndex) -> None:
        self._prefixes = prefixes
        self._under_way: dict[tuple[str, bytes], Counter[str]] = {}
        """For each cache salt and digest, the ids of hosts that compute the encoding."""

    def hosts(self, span: MediaSpan, cache_salt: str) -> frozenset[str]:
        """Return the ids of hosts that have the encoding of a span, or compute it now."""
        cached = self._prefixes.encoding_hosts(span.digest, span.length, cache_salt)
        return frozenset(cached).union(self._under_way.get((cache_salt, span.digest), ()))

    @contextlib.contextmanager
    def under_way(self, span: MediaSpan, cache_salt: str, host_id: str) -> Iterator[None]:
        """Note that a host computes an encoding. Other requests for it are sent there and wait for the result."""
        name = (cache_salt, span.digest)
        hosts = self._under_way.setdefault(name, Counter())
        hosts[host_id] += 1
        try:
            yield
        finally:
            hosts[host_id] -= 1
            if not hosts[host_id]:
                del hosts[host_id]
            if not hosts:
                del self._under_way[name]
