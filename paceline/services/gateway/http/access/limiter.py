"""The limits of all API keys at this gateway."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.request_classes import BACKGROUND
from paceline.proto.fleet_pb2 import KeyUse
from paceline.services.gateway.http.access.keys import AccessBook, KeyLimits
from paceline.services.gateway.http.access.limits import MINUTE, MinuteLimit, Part, Use, parts_of
from paceline.services.gateway.http.access.meter import Admission, Meter
from paceline.services.gateway.http.errors import CountRefusal

NEGLIGIBLE = 0.01
"""Rate in requests per minute below which a key counts as unused."""


@dataclass(frozen=True, slots=True)
class Gateways:
    """The reports of all gateways of the cluster about the use of keys."""

    own: str
    """Name of this gateway."""
    uses: Mapping[str, Sequence[Use]]
    """The newest report of each gateway, by the gateway's name. This gateway's own entry may be missing."""
    is_current: bool
    """Whether the reports are recent; false while Redis does not answer."""


class Limiter:
    """The use of all keys' limits at this gateway.

    Args:
        gateways: function that returns the newest reports of the cluster's gateways.
        count_refusal: called with the class of a request that is refused, and the reason.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        book: AccessBook,
        gateways: Callable[[], Gateways],
        count_refusal: CountRefusal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book = book
        self._gateways = gateways
        self._count_refusal = count_refusal
        self._clock = clock
        self._meters: dict[str, Meter] = {}
        """Meters of clients' requests, by owner."""
        self._line_meters: dict[str, Meter] = {}
        """Meters of lines of batches, by owner. Clients never wait because of these lines."""

    def begin(self, owner: str, *, is_line: bool = False) -> Admission:
        """Count a request of a key and return its admission. Raises ApiError if a limit of requests is reached.

        Args:
            owner: digest of the key.
            is_line: whether the request is a line of a batch, which may only use what clients of the key leave.
        """
        meter = self._line_meter(owner) if is_line else self._meter(owner)
        if meter is not None:
            meter.begin(self._clock())
        return Admission(meter, self._clock)

    def read(self, owner: str) -> None:
        """Count a request of a key that has no body. Raises ApiError if the limit of such requests is reached."""
        if (meter := self._meter(owner)) is not None:
            meter.read(self._clock())

    def headers(self, owner: str) -> dict[str, str]:
        """Return the response headers that tell a client its limits, with the names of OpenAI's API."""
        meter, now = self._meter(owner), self._clock()
        if meter is None:
            return {}
        requests = _headers("requests", meter.requests, meter.parts.requests, now)
        return requests | _headers("tokens", meter.tokens, meter.parts.tokens, now)

    def report(self) -> list[KeyUse]:
        """Return this gateway's report to the other gateways about each key, and forget keys that are not used."""
        now, reports = self._clock(), []
        for owner, meter in list(self._meters.items()):
            requests, tokens = (limit.used(now) if limit else 0 for limit in (meter.requests, meter.tokens))
            wanted = meter.wanted_requests.now(now) * MINUTE
            if meter.is_used(now) or wanted > NEGLIGIBLE:
                reports.append(
                    KeyUse(
                        name=meter.name,
                        requests=requests,
                        tokens=max(0, tokens),
                        running=meter.running,
                        wanted_requests=wanted,
                        wanted_tokens=meter.wanted_tokens.now(now) * MINUTE,
                        wanted_running=meter.running + meter.refused_places.now(now),
                    )
                )
            else:
                del self._meters[owner]
        for owner, meter in list(self._line_meters.items()):
            if not meter.is_used(now):
                del self._line_meters[owner]
        return reports

    def _meter(self, owner: str) -> Meter | None:
        """Return the meter for requests of a key; None if the key has no limits."""
        key = self._book.key(owner)
        if key is None or key.limits == KeyLimits():
            return None
        meter = self._meters.get(owner)
        if meter is None:
            meter = self._meters[owner] = Meter(key.name, key.limits, self._count_limited, self._clock())
        meter.set_limits(key.limits, self._clock())
        meter.request_class = key.request_class
        gateways = self._gateways()
        uses = {name: next((use for use in told if use.name == key.name), None) for name, told in gateways.uses.items()}
        meter.parts = parts_of(key.limits, gateways.own, uses, gateways.is_current)
        return meter

    def _count_limited(self, request_class: str) -> None:
        self._count_refusal(request_class, "limit")

    def _line_meter(self, owner: str) -> Meter | None:
        """Return the meter for the lines of a key's batches; None if the key has no limits."""
        clients = self._meter(owner)
        if clients is None:
            return None
        now = self._clock()
        meter = self._line_meters.get(owner)
        if meter is None:
            meter = self._line_meters[owner] = Meter(clients.name, clients.limits, self._count_limited, now)
        meter.set_limits(clients.limits, now)
        meter.request_class = BACKGROUND
        meter.parts = clients.left(now)
        return meter


def _headers(kind: str, limit: MinuteLimit | None, part: Part, now: float) -> dict[str, str]:
    if limit is None:
        return {}
    return {
        f"x-ratelimit-limit-{kind}": str(limit.per_minute),
        f"x-ratelimit-remaining-{kind}": str(limit.remaining(now, part)),
        f"x-ratelimit-reset-{kind}": f"{limit.reset(now):.3g}s",
    }
