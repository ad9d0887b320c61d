from __future__ import annotations

from bench.media_hostile import Attacks


def test_attacks_are_of_all_kinds_and_come_from_the_seed() -> None:
    one, same, other = Attacks(1), Attacks(1), Attacks(2)
    sent = [one.next() for _ in range(100)]
    assert sent == [same.next() for _ in range(100)] != [other.next() for _ in range(100)]
    assert len({kind for kind, _ in sent}) > 8
    assert {part["type"] for _, part in sent} == {"image_url", "video_url", "audio_url"}
