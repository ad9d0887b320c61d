"""Work that shares a core."""

from __future__ import annotations

import pytest

from paceline.simulator.events import Events
from paceline.simulator.sharing import Sharing


def test_pieces_share_the_time_of_a_core() -> None:
    events = Events()
    sharing, ends = Sharing(events), dict[str, float]()

    def begin(name: str, seconds: float) -> None:
        sharing.add(seconds, lambda: ends.setdefault(name, events.now))

    events.at(1.0, begin, "first", 2.0)
    events.at(2.0, begin, "second", 1.5)  # both have 1 s and 1.5 s left, and take 2 s until the first one ends
    events.at(10.0, begin, "third", 1.0)
    events.run(lambda: False)
    assert ends == pytest.approx({"first": 4.0, "second": 4.5, "third": 11.0})
