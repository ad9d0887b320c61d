"""The default cache policy: the better of a forecast and ARC, as measured on samples of the load."""

from __future__ import annotations

from paceline.core.cache_policy.arc import ARC
from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.forecast import REMEMBERED, Forecast
from paceline.core.cache_policy.ranking import Block, Name, Place

_SHADOW_SLOTS = 384
"""Least number of slots of a shadow cache of a large memory. With fewer, chance decides which is better."""
_SHIFTS = range(1, 5)
"""One of 2, 4, 8 or 16 blocks is sampled, the fewer the larger the memory is."""
_WINDOW = 1 << 13
"""Least number of block uses within which half of the measured hits are forgotten."""
_COMPARISONS = 16
"""Comparisons within this number of uses."""


class Adaptive(CachePolicy):
    """Evicts by `Forecast` or by `ARC`, whichever would have found more blocks lately.

    Both rank the blocks of the memory, and one of them leads. Each also runs a shadow cache, which has only names. The
    shadow caches see a sample of the blocks, and have the same share of the slots. Their hits tell what the memory
    would find if one of the two always led.

    Args:
        slots: number of blocks that the memory can hold.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        shift = max((shift for shift in _SHIFTS if slots >> shift >= _SHADOW_SLOTS), default=_SHIFTS[0])
        self._mask = (1 << shift) - 1
        sampled = max(1, slots >> shift)
        self._forecast, self._arc = Forecast(slots), ARC(slots)
        self._shadows = Shadow(Forecast(sampled, REMEMBERED >> shift)), Shadow(ARC(sampled))
        self._leader: Forecast | ARC = self._forecast
        self._sampled: dict[Name, Name | None] = {}
        """The nearest block of the sample at or before each block in its context."""
        self._step = max(_WINDOW, 2 * slots) // _COMPARISONS
        self._uses = 0

    def choose(self) -> Name:
        return self._leader.choose()

    def offer(self, block: Block) -> None:
        self._forecast.offer(block)
        self._arc.offer(block)

    def withdraw(self, block: Block) -> None:
        self._forecast.withdraw(block)
        self._arc.withdraw(block)

    def inserted(self, block: Block) -> None:
        self._forecast.inserted(block)
        self._arc.inserted(block)
        before = None if block.parent is None else self._sampled.get(block.parent)
        self._sampled[block.name] = block.name if self._is_sampled(block) else before
        self._use(block)

    def touched(self, block: Block) -> None:
        self._forecast.touched(block)
        self._arc.touched(block)
        self._use(block)

    def hinted(self, block: Block) -> None:
        self._forecast.hinted(block)
        if block.hint is not None and self._is_sampled(block):
            for shadow in self._shadows:
                shadow.policy.expect(block.name, block.hint)

    def released(self, block: Block) -> None:
        self._forecast.released(block)

    def gone(self, block: Block, evicted: bool) -> None:
        self._forecast.gone(block, evicted)
        self._arc.gone(block, evicted)
        del self._sampled[block.name]

    def _is_sampled(self, block: Block) -> bool:
        return block.name[1][-1] & self._mask == 0

    def _use(self, block: Block) -> None:
        self._uses += 1
        if self._uses % self._step == 0:
            self._compare()
        if self._is_sampled(block):
            before = None if block.parent is None else self._sampled.get(block.parent)
            for shadow in self._shadows:
                shadow.use(block.name, before)

    def _compare(self) -> None:
        forecast, arc = self._shadows
        self._leader = self._forecast if forecast.hits >= arc.hits else self._arc
        for shadow in self._shadows:
            shadow.hits *= 0.5 ** (1 / _COMPARISONS)


class Shadow:
    """A cache of names without blocks, which counts its hits."""

    def __init__(self, policy: CachePolicy) -> None:
        self.policy = policy
        self.hits = 0.0

    def use(self, name: Name, parent: Name | None) -> None:
        """Request a block. It is found, or it is added and another one is evicted."""
        policy = self.policy
        if policy.get(name) is not None:
            policy.touch([name])
            self.hits += 1
            return
        if len(policy.blocks()) >= policy.slots:
            policy.evict(1)
        policy.insert(name, Place(parent))
        policy.release(name)
