"""The newest wish for the sleep of one model's workers, which gateways and workers tell each other."""

from __future__ import annotations

import time
from collections.abc import Iterable

from paceline.proto.fleet_pb2 import Sleep


def is_sleep(wish: Sleep) -> bool:
    """Return whether any part of a worker sleeps."""
    return bool(wish.weights or wish.kv_cache)


def agree(state: Sleep, wish: Sleep) -> bool:
    """Return whether the same parts sleep equally deep in both, and are woken by the same: a request or an operator."""
    return (state.weights, state.kv_cache, state.by_itself) == (wish.weights, wish.kv_cache, wish.by_itself)


class SleepBook:
    """The newest wish. Until somebody has wished for a sleep, the workers are awake.

    Workers report the wish that they have fulfilled. So a gateway that starts learns it from them if no other gateway
    is left, and Redis keeps nothing.
    """

    def __init__(self) -> None:
        self.wish = Sleep()

    def want(self, weights: int, kv_cache: bool, mode: str = "", by_itself: bool = False) -> Sleep:
        """Make a wish that is newer than all others, and return it.

        Args:
            weights, kv_cache, mode, by_itself: see `Sleep`.
        """
        changed = max(time.time_ns(), self.wish.changed + 1)
        self.wish = Sleep(weights=weights, kv_cache=kv_cache, mode=mode, by_itself=by_itself, changed=changed)
        return self.wish

    def merge(self, wishes: Iterable[Sleep]) -> bool:
        """Take the newest of some wishes, if it is newer than the one that is known. Return whether it is.

        What has no instant is no wish: it is the state of a worker between two sleeps.
        """
        newest = max((wish for wish in wishes if wish.changed), key=_order, default=self.wish)
        if _order(newest) <= _order(self.wish):
            return False
        self.wish = newest
        return True


def _order(wish: Sleep) -> tuple[int, bytes]:
    """Return a key by which all gateways order wishes in the same way, even if two have the same instant."""
    return wish.changed, wish.SerializeToString(deterministic=True)
