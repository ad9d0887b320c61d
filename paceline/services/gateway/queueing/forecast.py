"""The forecast of a request's wait for its first token. Pure logic: all instants are of one clock, in seconds.

The forecast uses measurements only: the rate at which waiting work is admitted, and the time from an admission to the
first token. So it is valid whether prefill, decoding or KV memory is the bottleneck of the fleet.
"""

from __future__ import annotations

import math
from collections import deque

HALF_LIFE = 10.0
"""Half-life of the measured rate, in seconds. Only time during which requests wait counts."""
LEAST_SECONDS = 1.0
LEAST_ADMISSIONS = 4
"""Number of admissions before which the rate counts as unknown. Requests must also have waited for LEAST_SECONDS."""
KEPT_SAMPLES = 256
KEPT_SECONDS = 60.0
"""Age in seconds after which a measured time to first token is dropped. At most KEPT_SAMPLES of them are kept."""
ALIKE = 2.0
"""Prompts have about the same length if one is at most this many times as long as the other."""
LEAST_ALIKE = 8
"""Least number of samples from prompts of about the same length. If there are fewer, all samples count."""
USUAL_OF = 16
"""Number of a key's latest answers over which the mean length is taken."""
UNKNOWN_ANSWER = 256
"""Assumed length of an answer in tokens, before any answer of a key has ended."""


class AdmissionRate:
    """The rate at which waiting work is admitted, in tokens per second. Only time during which requests wait counts."""

    def __init__(self) -> None:
        self._work = self._seconds = 0.0
        self._waited, self._admissions = 0.0, 0
        """Total seconds in which requests waited, and total admissions, to compare with LEAST_SECONDS and
        LEAST_ADMISSIONS."""
        self._since: float | None = None
        """Instant up to which the waiting time is counted; None while no request waits."""

    def set_waiting(self, is_waiting: bool, now: float) -> None:
        """Note that from `now` on requests wait, or that no request waits any more."""
        self._advance(now)
        self._since = now if is_waiting else None

    def admit(self, work: float, now: float) -> None:
        """Count the work of a request that has waited and is admitted now, in tokens."""
        self._advance(now)
        self._work += work
        self._admissions += 1

    def per_second(self, now: float) -> float | None:
        """Return the admitted work in tokens per second; None if too little has been measured."""
        self._advance(now)
        if self._waited < LEAST_SECONDS or self._admissions < LEAST_ADMISSIONS:
            return None
        return self._work / self._seconds

    def _advance(self, now: float) -> None:
        if self._since is None or now <= self._since:
            return
        passed = now - self._since
        kept = 0.5 ** (passed / HALF_LIFE)
        # The integral of the decay, so that a constant rate is measured exactly.
        self._seconds = self._seconds * kept + (1 - kept) * HALF_LIFE / math.log(2)
        self._work *= kept
        self._waited += passed
        self._since = now


class FirstTokens:
    """Measured times from an admission to the first token, minus the time in which an idle worker computes the prompt.

    Workers compute short prompts first. So the forecast for a prompt uses samples of prompts of about the same length,
    if there are enough.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=KEPT_SAMPLES)
        """For each request: the instant of its first token, the time in which an idle worker computes its prompt, and
        the rest of its time to first token, in seconds."""

    def note(self, seconds: float, prompt_seconds: float, now: float) -> None:
        """Count a request that got its first token.

        Args:
            seconds: time from the request's admission to its first token, in seconds.
            prompt_seconds: time in which an idle worker would compute the prompt, in seconds.
        """
        self._samples.append((now, prompt_seconds, max(0.0, seconds - prompt_seconds)))

    def seconds(self, prompt_seconds: float, percentile: float, now: float) -> float:
        """Return a forecast of the time from admission to first token, in seconds.

        Args:
            prompt_seconds: time in which an idle worker would compute the prompt, in seconds.
            percentile: share of requests whose time does not exceed the forecast, from 0 to 1.
        """
        while self._samples and self._samples[0][0] < now - KEPT_SECONDS:
            self._samples.popleft()
        samples = [
            (max(own, prompt_seconds) <= ALIKE * min(own, prompt_seconds), rest) for _, own, rest in self._samples
        ]
        extra = [rest for is_alike, rest in samples if is_alike]
        if len(extra) < LEAST_ALIKE:
            extra = [rest for _, rest in samples]
        extra.sort()
        return prompt_seconds + (extra[math.ceil(percentile * len(extra)) - 1] if extra else 0.0)


class UsualAnswers:
    """Mean lengths of the latest answers of each owner, in tokens."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}

    def note(self, owner: str, tokens: int) -> None:
        """Count an answer that has ended with this number of tokens."""
        usual = self._tokens.get(owner)
        self._tokens[owner] = tokens if usual is None else usual + (tokens - usual) / USUAL_OF

    def tokens(self, owner: str, max_tokens: int) -> float:
        """Return the expected length of an owner's next answer, in tokens, at most `max_tokens`."""
        return min(max_tokens, self._tokens.get(owner, UNKNOWN_ANSWER))
