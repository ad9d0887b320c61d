"""What a worker holds at kvtransfer, as far as it knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.core.kv_layout import KVLayout
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.wire import key_from_pb
from paceline.services.worker.touched import TouchedBlocks


class KVHolds:
    """The newest hold of each request and attempt, to be renewed, and the blocks that the engine may be touching.

    Args:
        on_lost: called for a hold that ended although nobody here gave it back.
    """

    def __init__(self, on_lost: Callable[[Key], None]) -> None:
        self.blocks = TouchedBlocks()
        self._on_lost = on_lost
        self._held: dict[tuple[str, int], Key] = {}

    def __contains__(self, key: Key) -> bool:
        return self._held.get(key[:2]) == key

    def keys(self) -> list[Key]:
        return list(self._held.values())

    def keep(self, hold: pb.Hold) -> None:
        key = key_from_pb(hold.key)
        self._held[key[:2]] = key
        self.blocks.obtain(key, hold)

    def adopt(self, key: Key, adoption: pb.Adoption) -> tuple[Key, list[list[int]]]:
        """What was reserved under `key` is this worker's to write. Returns its key from now on, and its tables."""
        adopted = self._held[key[:2]] = key_from_pb(adoption.key)
        return adopted, self.blocks.adopt(key, adopted, adoption.filled_tokens, adoption.trimmed_blocks)

    def let_go(self, key: Key) -> None:
        """An older generation may come late, when the request has new blocks: those stay."""
        held = self._held.get(key[:2])
        if held is not None and held.generation <= key.generation:
            del self._held[key[:2]]

    def give_back(self, key: Key) -> None:
        """Nobody here touches the blocks any more."""
        self.let_go(key)
        self.blocks.give_back(key)

    def lose(self, key: Key) -> None:
        self.let_go(key)
        self._on_lost(key)

    def lose_all(self, keep_used: bool) -> None:
        """The service has ended. What the engine has can go on in the next one, where `keep_used`."""
        for key in self.keys():
            if not (keep_used and self.blocks.is_used(key)):
                self.lose(key)

    def claims(self, layout: KVLayout) -> Sequence[pb.Claim]:
        """Of all that the engine has, whether it goes on or not."""
        return self.blocks.claims(layout, self.__contains__)
