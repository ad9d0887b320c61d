"""Prompts of texts and media: token ids, and the spans of placeholder tokens in them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.core.media import MediaInput, MediaKind, MediaSpan
from paceline.services.gateway.media.expansion import Piece, Run
from paceline.services.gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, ready to be computed."""

    token_ids: list[int]
    media: tuple[MediaSpan, ...] = ()
    inputs: tuple[MediaInput, ...] = ()
    """The encoder's input for each of `media`."""


def encode_prompt(pieces: Iterable[Piece], tokenizer: Tokenizer, add_special_tokens: bool, param: str) -> Prompt:
    """Return the prompt that is made of pieces. Neighbouring texts are tokenized as one.

    Raises:
        InvalidRequestError: a text is not valid Unicode; the error names `param`.
    """
    begin, end = tokenizer.special_ends if add_special_tokens else ([], [])
    token_ids = [*begin]
    spans, inputs = [], []
    for is_text, group in itertools.groupby(pieces, key=lambda piece: isinstance(piece, str)):
        if is_text:
            token_ids += tokenizer.encode("".join(map(str, group)), False, param)
            continue
        for piece in group:
            if isinstance(piece, Run):
                own = piece.input
                spans.append(MediaSpan(len(token_ids), own.length, piece.digest, own.kind, piece.grid))
                inputs.append(own)
                token_ids += [piece.token_id] * own.length
            elif isinstance(piece, int):
                token_ids.append(piece)
    token_ids += end
    return Prompt(token_ids, tuple(spans), tuple(inputs))


_COUNTS = {
    MediaKind.IMAGE: "image_tokens",
    MediaKind.VIDEO_FRAME: "video_tokens",
    MediaKind.AUDIO: "audio_tokens",
}


def media_tokens(spans: Sequence[MediaSpan]) -> dict[str, int]:
    """Return the number of placeholder tokens of each kind that there is, by its name in `prompt_tokens_details`."""
    counts: Counter[str] = Counter()
    for span in spans:
        counts[_COUNTS[span.kind]] += span.length
    return dict(counts)
