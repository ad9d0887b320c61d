"""The order in which workers of a role leave if there are too many: the worker with the least loss leaves first. The
functions have no side effects.

A loss is measured in tokens that have to be computed again, or moved to another host instead:

    running requests     each continues elsewhere after a handoff, which computes the tokens of its last block again
    queued tokens        prompt tokens that the worker has accepted and not computed; their clients wait for them
    cached tokens        tokens in blocks that only its host has, if the worker is the last one of its host, because no
                         worker would compute there any more

Two things outweigh every loss. A worker that is not ready yet has nothing to lose. The last worker with its numerics
that runs requests leaves last, because their next tokens could differ elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from paceline.core.numerics import Numerics

REQUEST_TOKENS = 64
"""Loss for a running request: its last block is computed again, and it waits for the queue and a handoff."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One worker that could leave, and the work that would be lost with it."""

    worker_id: str
    role: str
    host_id: str = ""
    epoch: int = 0
    """Epoch of the worker. If two workers have equal losses, the one with the newer epoch leaves first."""
    is_ready: bool = True
    """Whether the worker takes work. A worker that is starting takes none."""
    running: int = 0
    """Number of requests that the worker runs, including requests that wait for blocks."""
    queued_tokens: int = 0
    """Number of prompt tokens that the worker has accepted and not computed yet."""
    numerics: Numerics | None = None
    """Numerics of the worker; None if unknown. Unknown numerics count as different from those of all other workers."""


def loss(worker: Standing, stay: Collection[Standing], only_cached: Mapping[str, int]) -> float:
    """Return the number of tokens that have to be computed again, or moved, if a worker leaves.

    Args:
        stay: all workers that do not leave, of all roles; this one may be among them.
        only_cached: for each host id, the tokens of its cached blocks that no other host has.
    """
    is_last = all(each.host_id != worker.host_id for each in stay if each.worker_id != worker.worker_id)
    cached = only_cached.get(worker.host_id, 0) if is_last else 0
    return REQUEST_TOKENS * worker.running + worker.queued_tokens + cached


def victims(workers: Iterable[Standing], role: str, count: int, only_cached: Mapping[str, int]) -> list[str]:
    """Return the ids of at most `count` workers of a role that should leave, in the order in which they should leave.

    Args:
        workers: all workers that do not drain, of all roles.
        only_cached: for each host id, the tokens of its cached blocks that no other host has.
    """
    stay, gone = list(workers), list[str]()
    while len(gone) < count and (candidates := [worker for worker in stay if worker.role == role]):
        same = Counter(worker.numerics for worker in candidates if worker.is_ready)

        def rank(worker: Standing, same: Mapping[Numerics | None, int] = same) -> tuple[object, ...]:
            is_alone = worker.running > 0 and (worker.numerics is None or same[worker.numerics] == 1)
            return worker.is_ready, is_alone, loss(worker, stay, only_cached), -worker.epoch, worker.worker_id

        victim = min(candidates, key=rank)
        stay.remove(victim)
        gone.append(victim.worker_id)
    return gone


def tokens_only_here(blocks: Mapping[str, Iterable[tuple[bytes, int]]]) -> dict[str, int]:
    """Return, for each host, the number of tokens in its cached blocks that no other host has.

    Args:
        blocks: for each host id, the name and the tokens of each of its cached blocks.
    """
    hosts_with = Counter(name for held in blocks.values() for name, _ in held)
    return {host: sum(tokens for name, tokens in held if hosts_with[name] == 1) for host, held in blocks.items()}
