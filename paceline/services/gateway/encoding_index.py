"""Where the encoding of an image, a frame or audio is cached or computed now, as far as this gateway knows."""

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
        self._computing: dict[tuple[str, bytes], Counter[str]] = {}
        """For each cache salt and digest, the ids of workers that have been asked for the encoding."""

    def hosts(self, span: MediaSpan, cache_salt: str) -> frozenset[str]:
        """Return the ids of hosts that have cached the encoding of a span."""
        return frozenset(self._prefixes.encoding_hosts(span.digest, span.length, cache_salt))

    def workers(self, span: MediaSpan, cache_salt: str) -> frozenset[str]:
        """Return the ids of workers that compute the encoding of a span for this gateway now."""
        return frozenset(self._computing.get((cache_salt, span.digest), ()))

    @contextlib.contextmanager
    def computing(self, span: MediaSpan, cache_salt: str, worker_id: str) -> Iterator[None]:
        """Note that a worker computes an encoding. Other requests for it are sent there and wait for the result."""
        name = (cache_salt, span.digest)
        workers = self._computing.setdefault(name, Counter())
        workers[worker_id] += 1
        try:
            yield
        finally:
            workers[worker_id] -= 1
            if not workers[worker_id]:
                del workers[worker_id]
            if not workers:
                del self._computing[name]
