"""Links between hosts, as far as blocks have to get over them."""

from __future__ import annotations

import logging
import random
import time

from paceline.services.gateway.router import Link

CUT_SECONDS = (10.0, 20.0)

log = logging.getLogger(__name__)


class Links:
    """Over which links between hosts KV blocks did not get through lately."""

    def __init__(self) -> None:
        self._cut_until: dict[Link, float] = {}
        """On time.monotonic()."""

    def avoid(self, link: Link) -> None:
        """Nothing is sent over this link for a while; then it is tried again."""
        self._cut_until[link] = time.monotonic() + random.uniform(*CUT_SECONDS)
        log.warning("KV blocks do not get from host %s to host %s; going on without", *link)

    def cut(self) -> frozenset[Link]:
        now = time.monotonic()
        self._cut_until = {link: until for link, until in self._cut_until.items() if until > now}
        return frozenset(self._cut_until)
