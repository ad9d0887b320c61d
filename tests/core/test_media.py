"""The digest of an encoder's input names it."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.media import DIGEST_BYTES, MediaInput, MediaKind, MediaSpan


def test_the_digest_depends_on_everything_that_an_encoder_reads() -> None:
    own = MediaInput(MediaKind.IMAGE, 4, "uint8", (2, 1, 3), b"abcdef")
    others = [
        replace(own, kind=MediaKind.VIDEO_FRAME),
        replace(own, length=5),
        replace(own, dtype="int8"),
        replace(own, shape=(1, 2, 3)),
        replace(own, data=b"abcdeg"),
    ]
    assert len({each.digest for each in [own, *others]}) == 6
    assert replace(own).digest == own.digest
    assert len(own.digest) == DIGEST_BYTES


def test_a_span_ends_after_its_last_token() -> None:
    assert MediaSpan(3, 4, bytes(DIGEST_BYTES), MediaKind.AUDIO).end == 7
