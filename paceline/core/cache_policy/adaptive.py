"""The default cache policy: the better of a forecast and ARC, as measured on samples of the load."""

from __future__ import annotations

from operator import attrgetter

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

    One of them leads and ranks the blocks of the memory. Each runs a shadow cache, which has only names. The shadow
    caches see a sample of the blocks, and have the same share of the slots. Their hits tell what the memory would find
    if one of the two always led.

    ARC knows no hints. While it leads, the forecast ranks the blocks with a hint, and evicts one of them if it is worth
    less than the block that ARC would evict.

    Args:
        slots: number of blocks that the memory can hold.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        shift = max((shift for shift in _SHIFTS if slots >> shift >= _SHADOW_SLOTS), default=_SHIFTS[0])
        self._mask = (1 << shift) - 1
        sampled = max(1, slots >> shift)
        self._forecast = Forecast(slots)  # learns all the time
        self._arc: ARC | None = None
        """ARC while it leads."""
        self._hinted_offers = 0
        """Blocks with a hint that are on offer while ARC leads."""
        self._shadow_arc = ARC(sampled)
        self._shadows = Shadow(Forecast(sampled, REMEMBERED >> shift)), Shadow(self._shadow_arc)
        self._sampled: dict[Name, Name | None] = {}
        """The nearest block of the sample at or before each block in its context."""
        self._step = max(_WINDOW, 2 * slots) // _COMPARISONS
        self._uses = 0

    def choose(self) -> Name:
        arc = self._arc
        if arc is None or not arc.offers:
            return self._forecast.choose()
        name = arc.choose()
        if self._hinted_offers:
            hinted = self._forecast.choose()
            return hinted if self._forecast.place(hinted) < self._forecast.place(name) else name
        return name

    def offer(self, block: Block) -> None:
        if self._arc is None:
            self._forecast.offer(block)
        elif block.hint is None:
            self._arc.offer(block)
        else:
            self._forecast.offer(block)
            self._hinted_offers += 1

    def withdraw(self, block: Block) -> None:
        if self._arc is None:
            self._forecast.withdraw(block)
        elif block.hint is None:
            self._arc.withdraw(block)
        else:
            self._forecast.withdraw(block)
            self._hinted_offers -= 1

    def inserted(self, block: Block) -> None:
        self._forecast.inserted(block)
        if self._arc is not None:
            self._arc.inserted(block)
        before = None if block.parent is None else self._sampled.get(block.parent)
        self._sampled[block.name] = block.name if self._is_sampled(block) else before
        self._use(block)

    def touched(self, block: Block) -> None:
        self._forecast.touched(block)
        if self._arc is not None:
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
        if self._arc is not None:
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
        if (arc.hits > forecast.hits) != (self._arc is not None):
            self._change_leader()
        for shadow in self._shadows:
            shadow.hits *= 0.5 ** (1 / _COMPARISONS)

    def _change_leader(self) -> None:
        """Let the other policy rank the blocks on offer, from now on."""
        offered = [block for block in self.blocks() if block.offered and block.name not in self._lost]
        for block in offered:
            self.withdraw(block)
        if self._arc is None:
            once = [block.name for block in self.blocks() if self._forecast.is_new(block.name)]
            self._arc = ARC(self.slots, once, self._shadow_arc.target / self._shadow_arc.slots)
        else:
            self._arc = None
        for block in sorted(offered, key=attrgetter("used")):
            self.offer(block)


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
