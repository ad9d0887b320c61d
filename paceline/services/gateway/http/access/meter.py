"""The use of one API key's limits at this gateway, and the charge for each request of the key.

Lines of batches are counted by a second meter of the key.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from paceline.core.request_classes import DEFAULT
from paceline.services.gateway.http.access.keys import KeyLimits
from paceline.services.gateway.http.access.limits import Charge, KeyParts, MinuteLimit, Part
from paceline.services.gateway.http.errors import ApiError, retry_after

READS_PER_REQUEST = 10
"""Number of requests without a body that a key may send for each other request of its limit. Clients poll with them."""
LATELY_SECONDS = 5.0
"""Time over which the wanted rates are averaged, in seconds."""
_USUAL_OF = 16
"""Number of the latest answers over which the mean length is taken."""
BUSY_SECONDS = 1
"""Delay after which a client should try again if too many requests of its key run, in seconds."""


class Rate:
    """A rate per second, averaged over the last seconds. Instants are in seconds."""

    def __init__(self, now: float) -> None:
        self._rate, self._at = 0.0, now

    def add(self, amount: float, now: float) -> None:
        self._rate = self.now(now) + amount / LATELY_SECONDS

    def now(self, now: float) -> float:
        """Return the average rate per second, at the instant `now`."""
        self._rate *= math.exp((self._at - now) / LATELY_SECONDS)
        self._at = now
        return self._rate


class Meter:
    """The limits of one key, and their use. All instants are of one clock, in seconds.

    Args:
        count_refusal: called with the class of a request that is refused.
    """

    def __init__(self, name: str, limits: KeyLimits, count_refusal: Callable[[str], object], now: float) -> None:
        self.name = name
        self.request_class = DEFAULT
        """Name of the request class of the key's requests."""
        self._count_refusal = count_refusal
        self.running = 0
        self.requests: MinuteLimit | None = None
        self.tokens: MinuteLimit | None = None
        self.reads: MinuteLimit | None = None
        """Limit of requests without a body, READS_PER_REQUEST times that of the others."""
        self.parts = KeyParts()
        """The parts of the limits that this gateway may use."""
        self.wanted_requests, self.wanted_tokens, self.refused_places = Rate(now), Rate(now), Rate(now)
        self.limits = KeyLimits()
        self._usual: float | None = None
        """Mean number of tokens in the latest answers; None before the first answer has ended."""
        self.set_limits(limits, now)

    def set_limits(self, limits: KeyLimits, now: float) -> None:
        """Change the limits. Earlier uses still count against the new limits."""
        if limits != self.limits:
            self.requests = _changed(self.requests, limits.requests_per_minute, now)
            self.tokens = _changed(self.tokens, limits.tokens_per_minute, now)
            reads = None if limits.requests_per_minute is None else READS_PER_REQUEST * limits.requests_per_minute
            self.reads = _changed(self.reads, reads, now)
            self.limits = limits

    def is_used(self, now: float) -> bool:
        """Return whether a request of the key runs, or requests or tokens were charged in the last minute."""
        return self.running > 0 or any(
            limit is not None and limit.used(now) for limit in (self.requests, self.tokens, self.reads)
        )

    def left(self, now: float) -> KeyParts:
        """Return the parts of the limits that this meter has not used."""
        return KeyParts(
            _left(self.requests, self.parts.requests, now),
            _left(self.tokens, self.parts.tokens, now),
            None if self.parts.places is None else self.parts.places - self.running,
        )

    def begin(self, now: float) -> None:
        """Count a request. Raises ApiError if the limit of requests is reached, per minute or at the same time."""
        self.wanted_requests.add(1, now)
        if self.parts.places is not None and self.running >= self.parts.places:
            self.refused_places.add(1, now)
            told = f"only {self.limits.max_concurrent} requests of the key {self.name!r} may run at a time"
            raise self._too_many("requests", told, BUSY_SECONDS)
        if self.requests is not None:
            self._take(self.requests, 1, now, self.parts.requests, "requests")

    def read(self, now: float) -> None:
        """Count a request without a body. Raises ApiError if the limit is reached."""
        if self.reads is not None:
            # Gateways do not tell each other of these requests, so each has its share of the rate.
            self._take(self.reads, 1, now, Part(self.parts.requests.share, None), "requests without a body")

    def charge(self, prompt_tokens: int, max_tokens: int, now: float) -> tuple[Charge, int] | None:
        """Charge the tokens that a request will probably use: its prompt, and an answer of the mean length.

        With the mean length, the sum of all charges is right. Otherwise a client that sets no max_tokens would be
        charged a whole context for each answer, and could use only a small part of its limit.

        Returns:
            The charge and its amount in tokens; None if the key has no limit of tokens.

        Raises ApiError if the tokens have to wait, or if the prompt alone is above the limit.
        """
        limit = self.tokens
        if limit is None:
            return None
        if prompt_tokens > limit.per_minute:
            message = (
                f"the prompt has {prompt_tokens} tokens, and the key {self.name!r} may use {limit.per_minute} per "
                "minute, so it can never be served: shorten it"
            )
            raise ApiError(400, message, type="tokens", code="rate_limit_exceeded")
        usual = max_tokens if self._usual is None else min(max_tokens, math.ceil(self._usual))
        amount = min(prompt_tokens + usual, limit.per_minute)
        self.wanted_tokens.add(amount, now)
        return self._take(limit, amount, now, self.parts.tokens, "tokens"), amount

    def correct(self, charge: Charge, more: int, now: float) -> Charge:
        """Add tokens to a charge, or take tokens back. Returns the charge to pass to the next correction.

        Args:
            more: tokens to add; negative to take tokens back.
        """
        return charge if self.tokens is None else self.tokens.correct(charge, more, now)

    def note_answer(self, tokens: int) -> None:
        """Include the length of an answer that has ended in the mean length, in tokens."""
        self._usual = tokens if self._usual is None else self._usual + (tokens - self._usual) / _USUAL_OF

    def _take(self, limit: MinuteLimit, amount: int, now: float, part: Part, kind: str) -> Charge:
        if (wait := limit.wait(amount, now, part)) > 0:
            told = f"the key {self.name!r} may use {limit.per_minute} {kind} per minute"
            raise self._too_many(kind.partition(" ")[0], told, wait)
        return limit.take(amount, now)

    def _too_many(self, kind: str, message: str, wait: float) -> ApiError:
        self._count_refusal(self.request_class)
        seconds = retry_after(wait)
        error = ApiError(429, f"{message}; try again in {seconds} s", type=kind, code="rate_limit_exceeded")
        error.headers["Retry-After"] = str(seconds)
        return error


def _changed(limit: MinuteLimit | None, per_minute: int | None, now: float) -> MinuteLimit | None:
    if limit is None or per_minute is None:
        return None if per_minute is None else MinuteLimit(per_minute, now)
    limit.per_minute = per_minute
    return limit


def _left(limit: MinuteLimit | None, part: Part, now: float) -> Part:
    """Return the part that is left after this meter's own uses. They count as used by other gateways."""
    if limit is None:
        return part
    others = limit.per_minute - part.ceiling(limit.per_minute)
    return Part(part.share, math.ceil(others) + limit.used(now))


class Admission:
    """The charge of a request, from its beginning to its end. Without a meter, nothing is charged or limited.

    It is a context manager: the request counts as running while at least one `with` statement is open. A background
    response opens its own, because it goes on after its HTTP request has ended.
    """

    def __init__(self, meter: Meter | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter = meter
        self._clock = clock
        self._open = 0
        self._charge: Charge | None = None
        self._charged = 0
        self._generated = 0
        self._runs = False

    def __enter__(self) -> Admission:
        if self._meter is not None and not self._open:
            self._meter.running += 1
        self._open += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._open -= 1
        if self._meter is not None and not self._open:
            self._meter.running -= 1

    def charge(self, prompt_tokens: int, max_tokens: int) -> None:
        """Charge the tokens that the request will probably use. Raises ApiError if it would exceed a limit now.

        Args:
            max_tokens: largest number of tokens of all answers together.
        """
        if self._meter is not None and (taken := self._meter.charge(prompt_tokens, max_tokens, self._clock())):
            self._charge, self._charged = taken

    def refund(self) -> None:
        """Take the charge back, unless workers have begun the request."""
        if not self._runs:
            self._set_charge(0)

    def run(self) -> None:
        """Note that workers have begun the request, so that `refund` does nothing."""
        self._runs = True

    def spend(self, tokens: int, prompt_tokens: int) -> None:
        """Count generated tokens. Tokens beyond the expected number are charged at once.

        Args:
            tokens: number of newly generated tokens.
            prompt_tokens: number of tokens of the prompts.
        """
        self._generated += tokens
        if self._charge is not None and prompt_tokens + self._generated > self._charged:
            self._set_charge(prompt_tokens + self._generated)

    def settle(self, prompt_tokens: int, has_answer: bool = True) -> None:
        """Correct the charge to the tokens that the request has used. Call this when it has ended.

        Args:
            prompt_tokens: number of tokens of the prompts; 0 if no worker accepted them.
            has_answer: whether tokens were to be generated, so that their number says how long answers usually are.
        """
        self._set_charge(prompt_tokens + self._generated)
        if self._meter is not None and prompt_tokens and has_answer:
            self._meter.note_answer(self._generated)

    def _set_charge(self, amount: int) -> None:
        if self._meter is not None and self._charge is not None and amount != self._charged:
            self._charge = self._meter.correct(self._charge, amount - self._charged, self._clock())
            self._charged = amount
