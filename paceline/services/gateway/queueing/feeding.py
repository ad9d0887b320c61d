"""Whether the workers that compute prompts have enough to do. Pure logic.

Requests wait in the gateway's queue, which is fair, and not in the workers', where the shortest prompts go first. So a
worker gets just enough prompts that it never waits for the next one. Only prompts that go before a new one count. So a
short prompt does not wait here until a worker has computed a long one, before which it would be computed there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.services.gateway.routing.candidates import Candidate, Need, Snapshot

FED_SECONDS = 0.25
"""Time for which the prompts in a worker's own queue keep it busy."""
FED_TOKENS = 1024
"""Tokens of prompts that keep a worker busy if it has not measured its rate yet."""


def is_fed(worker: Candidate, prompt_tokens: float = math.inf) -> bool:
    """Return whether a worker has enough prompts in its own queue that go before a prompt of so many tokens."""
    return worker.queued_before(prompt_tokens) >= (FED_SECONDS * worker.tokens_per_second or FED_TOKENS)


def are_fed(need: Need, snapshot: Iterable[Candidate]) -> bool:
    """Return whether all workers that could compute a prompt have enough prompts. False if there is no such worker."""
    if isinstance(snapshot, Snapshot):
        hungriest = snapshot.hungriest(need, FED_SECONDS, FED_TOKENS)
        return hungriest is not None and is_fed(hungriest)
    fitting = [c for c in snapshot if c.member.state == "ready" and c.member.max_model_len >= need.context_tokens]
    computing = [c for c in fitting if c.member.role == "prefill"] or [c for c in fitting if c.member.role == "decode"]
    return bool(computing) and all(map(is_fed, computing))
