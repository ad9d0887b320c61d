"""One request of a key, and what the key is charged for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.services.gateway.http.access.meter import Meter
from paceline.services.gateway.http.access.minute_limit import Charge


class Admission:
    """The charge of a request, from its beginning to its end. Without a meter nothing is charged or limited.

    It is a context manager: the request runs while at least one `with` statement is open. A response in the background
    goes on after its HTTP request has ended.
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
        """Charge what the request will probably use. Raises ApiError if it has to wait.

        Args:
            max_tokens: most tokens of all answers together.
        """
        if self._meter is not None and (taken := self._meter.charge(prompt_tokens, max_tokens, self._clock())):
            self._charge, self._charged = taken

    def refund(self) -> None:
        """Take the charge back, unless the request runs."""
        if not self._runs:
            self._set_charge(0)

    def run(self) -> None:
        """Say that the request runs."""
        self._runs = True

    def spend(self, tokens: int, prompt_tokens: int) -> None:
        """Count tokens that were generated. Those beyond the expected number are charged at once."""
        self._generated += tokens
        if self._charge is not None and prompt_tokens + self._generated > self._charged:
            self._set_charge(prompt_tokens + self._generated)

    def settle(self, prompt_tokens: int) -> None:
        """Charge what the request has used, now that it has ended.

        Args:
            prompt_tokens: tokens of the prompts; 0 if no worker took them.
        """
        self._set_charge(prompt_tokens + self._generated)
        if self._meter is not None and prompt_tokens:
            self._meter.note_answer(self._generated)

    def _set_charge(self, amount: int) -> None:
        if self._meter is not None and self._charge is not None and amount != self._charged:
            self._charge = self._meter.correct(self._charge, amount - self._charged, self._clock())
            self._charged = amount
