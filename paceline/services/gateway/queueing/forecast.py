"""The forecast of a request's wait for its first token. Pure logic: all instants are of one clock, in seconds.

The forecast is made of measurements only: the rate at which waiting work is admitted, and the time from an admission to
the first token. So it holds whatever limits the fleet: prefill, places for decoding, or KV memory.
"""

from __future__ import annotations

import math
from collections import deque

HALF_LIFE = 10.0
"""Half-life of the measured rate, in seconds in which somebody waited."""
LEAST_SECONDS = 1.0
LEAST_ADMISSIONS = 4
"""The rate is not known before somebody has waited for LEAST_SECONDS and LEAST_ADMISSIONS requests were admitted."""
KEPT_SAMPLES = 256
KEPT_SECONDS = 60.0
"""The newest KEPT_SAMPLES times to first token of the last KEPT_SECONDS count."""
ALIKE = 2.0
"""Prompts have about the same length if one is at most this many times as long as the other."""
LEAST_ALIKE = 8
"""With fewer samples of about the same length, all samples count."""
USUAL_OF = 16
"""Number of the latest answers of a key whose mean length is the usual one."""
UNKNOWN_ANSWER = 256
"""Tokens of an answer to assume, before any answer of a key has ended."""


class AdmissionRate:
    """The rate at which waiting work is admitted. Only time counts in which somebody waits."""

    def __init__(self) -> None:
        self._work = self._seconds = 0.0
        self._waited, self._admissions = 0.0, 0
        """Totals, for LEAST_SECONDS and LEAST_ADMISSIONS."""
        self._since: float | None = None
        """Up to when the time is counted; None while nobody waits."""

    def set_waiting(self, is_waiting: bool, now: float) -> None:
        """Say whether somebody waits from now on."""
        self._advance(now)
        self._since = now if is_waiting else None

    def admit(self, work: float, now: float) -> None:
        """Count work of a request that waited and is admitted."""
        self._advance(now)
        self._work += work
        self._admissions += 1

    def per_second(self, now: float) -> float | None:
        """Return the admitted work per second; None if it is not known yet."""
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
    """Times from an admission to the first token, without the time to compute the prompt at the fleet's rate.

    Workers let short prompts go first. So a prompt is compared with others of about its length, if there are enough.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=KEPT_SAMPLES)
        """For each request the instant, the time of the prompt alone, and the rest of the time."""

    def note(self, seconds: float, prompt_seconds: float, now: float) -> None:
        """Count a request that got its first token.

        Args:
            seconds: from its admission to its first token.
            prompt_seconds: time to compute its prompt if the worker had nothing else to do.
        """
        self._samples.append((now, prompt_seconds, max(0.0, seconds - prompt_seconds)))

    def seconds(self, prompt_seconds: float, percentile: float, now: float) -> float:
        """Return the time to the first token that a share `percentile` of admitted requests does not exceed."""
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
    """Mean lengths of the latest answers, by owner."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}

    def note(self, owner: str, tokens: int) -> None:
        """Count an answer that has ended."""
        usual = self._tokens.get(owner)
        self._tokens[owner] = tokens if usual is None else usual + (tokens - usual) / USUAL_OF

    def tokens(self, owner: str, max_tokens: int) -> float:
        """Return the expected length of an answer that may have `max_tokens`."""
        return min(max_tokens, self._tokens.get(owner, UNKNOWN_ANSWER))
