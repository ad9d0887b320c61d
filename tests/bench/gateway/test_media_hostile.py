from __future__ import annotations

from bench.gateway.hostile_media import DEAD, MAYBE, READABLE, REFUSED, Attacks

URLS = {"http://media.test/slow": DEAD}
COUNT = 60
FEW = 15
"""Attacks that are made again, because most of the time goes into the making."""


def test_attacks_are_of_all_kinds_and_come_from_the_seed() -> None:
    one, same, other = Attacks(1, URLS), Attacks(1, URLS), Attacks(2, URLS)
    sent = [one.next() for _ in range(COUNT)]
    assert sent[:FEW] == [same.next() for _ in range(FEW)] != [other.next() for _ in range(FEW)]
    assert len({attack.name for attack in sent}) > 10
    assert {attack.kind for attack in sent} == {"image", "video", "audio"}
    assert {attack.answers for attack in sent} >= {DEAD, MAYBE, READABLE, REFUSED}
