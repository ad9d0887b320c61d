"""Prompts of texts and media: token ids, and the spans of placeholder tokens in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.core.media import MediaInput, MediaKind, MediaSpan
from paceline.services.gateway.planning.media.expansion import Piece, TokenRun
from paceline.services.gateway.planning.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, ready to be computed."""

    token_ids: list[int]
    media: tuple[MediaSpan, ...] = ()
    inputs: tuple[MediaInput, ...] = ()
    """The encoder's input for each of `media`."""


def encode_prompt(pieces: Iterable[Piece], tokenizer: Tokenizer, add_special_tokens: bool, param: str) -> Prompt:
    """Return the prompt that is made of pieces. All of it is tokenized as one text, as in the model's training.

    Raises:
        InvalidRequestError: a text is not valid Unicode; the error names `param`.
    """
    texts, runs = [], []
    for piece in pieces:
        if isinstance(piece, TokenRun):
            runs.append(piece)
        token_id = piece.token_id if isinstance(piece, TokenRun) else piece
        texts.append(token_id if isinstance(token_id, str) else tokenizer.reserved_texts[token_id])
    places = {run.token_id for run in runs}
    left = iter(runs)
    token_ids: list[int] = []
    spans, inputs = [], []
    for token_id in tokenizer.encode("".join(texts), add_special_tokens, param):
        if token_id not in places:
            token_ids.append(token_id)
            continue
        run = next(left)
        own = run.input
        spans.append(MediaSpan(len(token_ids), own.length, run.digest, own.kind, run.grid))
        inputs.append(own)
        token_ids += [token_id] * own.length
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
