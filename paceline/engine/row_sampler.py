"""The choice of the tokens of a step's rows, and the acceptance of their drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.core.types import Token
from paceline.engine.constraint import Constraints
from paceline.engine.rows import Rows
from paceline.engine.sampler import as_draw, best_of, sample
from paceline.engine.step import Chunk
from paceline.kernels.choosing import Draw, TokenChooser
from paceline.kernels.interface import Logits


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """The places of one chunk among the tokens, the hidden states and the logits of its step."""

    chunk: Chunk
    start: int
    """Index of the chunk's first token in its context."""
    inputs: range
    """Range of the chunk's tokens among the tokens of the step."""
    hidden: range
    """Rows of the step's hidden states that belong to the chunk: one for each of its last tokens."""
    logits: range
    """Rows of the step's logits that belong to the chunk: one for each of its last tokens, after which a token may be
    chosen. Empty if the chunk does not sample.
    """

    @property
    def length(self) -> int:
        """Number of context tokens before the token that the first row of logits chooses."""
        return self.start + len(self.inputs) - len(self.logits) + 1

    @property
    def sampled_inputs(self) -> range:
        """Range of the chunk's tokens with logits among the tokens of the step."""
        return self.inputs[len(self.inputs) - len(self.logits) :]

    @property
    def sampled_hidden(self) -> range:
        """The rows of hidden states from which logits are computed."""
        return self.hidden[len(self.hidden) - len(self.logits) :]


def locate_chunks(chunks: Sequence[Chunk], starts: Sequence[int], query_start: Sequence[int]) -> list[ChunkSpan]:
    """Return the places of the chunks of a step, in order.

    Args:
        starts: [chunks]: index of each chunk's first token in its context.
        query_start: [chunks + 1]: index of each chunk's first token in the step, and the number of all tokens.
    """
    spans: list[ChunkSpan] = []
    hidden_end = logits_end = 0
    for chunk, start, begin, end in zip(chunks, starts, query_start, query_start[1:]):
        sampled = (end - begin if chunk.follows else 1) if chunk.samples else 0
        wanted = end - begin if chunk.scored else max(sampled, chunk.states)  # all tokens but the last one have scores
        hidden = range(hidden_end, hidden_end := hidden_end + wanted)
        logits = range(logits_end, logits_end := logits_end + sampled)
        spans.append(ChunkSpan(chunk, start, range(begin, end), hidden, logits))
    return spans


class RowSampler:
    """Chooses tokens from logits: for many rows in one call if logits alone decide, otherwise row by row.

    Args:
        probabilistic: accept drafts as often as the distribution allows; if False, only drafts that would be sampled.
        chooser: chooses tokens of many rows in one call, if logits alone decide; None if the kernels have no such call.
    """

    def __init__(self, rows: Rows, constraints: Constraints, chooser: TokenChooser | None, probabilistic: bool) -> None:
        self._rows = rows
        self._constraints = constraints
        self._chooser = chooser
        self._probabilistic = probabilistic

    def choose(self, logits: Logits, inputs: Tensor, spans: Sequence[ChunkSpan]) -> dict[int, list[int]]:
        """Choose tokens for the rows in which logits alone decide, all in one call.

        Args:
            inputs: int64 [rows]: the input token of each row of logits.

        Returns:
            For each of these rows of the device's state, the accepted drafts and the token after them.
        """
        best = self._best(logits, spans)
        chosen: dict[int, list[int]] = {}
        draws: list[Draw] = []
        drawing: list[int] = []
        places: list[int] = []
        first_draws = [0]
        for span in spans:
            row = span.chunk.row
            if not span.chunk.samples:
                continue
            if best is not None and self._rows.row(row).takes_best:
                chosen[row] = best[span.logits.start : span.logits.stop]
            elif self._chooser is not None and (row_draws := self._draws(row, span.length, len(span.logits))):
                draws += row_draws
                drawing.append(row)
                places += span.logits
                first_draws.append(len(draws))
        if self._chooser is not None and draws:
            tokens = self._chooser.choose(logits.values, places, draws)
            if len(draws) > len(drawing):
                drafts = inputs[places] if len(places) < len(inputs) else inputs
                accepted = self._chooser.accept(tokens, drafts, first_draws).tolist()
                chosen |= {row: [token for token in kept if token >= 0] for row, kept in zip(drawing, accepted)}
            else:
                chosen |= {row: [token] for row, token in zip(drawing, tokens.tolist())}
        return chosen

    def verify(
        self, logits: Tensor, places: range, row: int, length: int, chosen: Sequence[int] | None
    ) -> tuple[list[Token], int]:
        """Sample tokens of a chunk until one differs from its draft. Return the tokens, and the number of accepted
        drafts.

        A draft that the grammar forbids is never sampled, so no mask is needed after it. If the grammar allows a draft
        but no token after it, there is no mask after it either; then the next step raises GrammarError.

        Args:
            logits: fp32 [rows, vocab] of all chunks of the step.
            places: rows of logits of this chunk, 1 + drafts. The first one chooses the token after `length` tokens.
            chosen: the accepted drafts and the token after them, if `choose` has chosen them; None to sample here.

        Raises:
            GrammarError: the row has a grammar, and it allows no token.
        """
        state, fixed = self._rows, self._rows.row(row)
        if not places:
            return [], 0
        tokens: list[Token] = []
        masks, drafts = self._constraints.masks(row), state.drafts_of(row)
        for index in range(len(places) if masks is None else min(len(masks), len(places))):
            draft = drafts[index] if index + 1 < len(places) else None
            if chosen is not None:
                token = Token(chosen[index])
            else:
                mask = masks[index] if masks is not None else fixed.allowed
                how = state.sampling_row(row, length + index, mask)
                token = sample(logits[places[index]], how, draft if self._probabilistic else None, self._chooser)
            tokens.append(token)
            is_draft = draft is not None and token.id == draft.token
            ended = fixed.ends(token.id, length + len(tokens))
            if ended or not is_draft:
                break
        state.append(row, [token.id for token in tokens], ended)
        return tokens, len(tokens) - (not is_draft)

    def _best(self, logits: Logits, spans: Sequence[ChunkSpan]) -> list[int] | None:
        """Return the best token of each row of logits; None if no chunk needs it, or if the chooser will find it."""
        if logits.best is not None:
            best: list[int] = logits.best.tolist()
            return best
        if self._chooser is None and any(
            span.chunk.samples and self._rows.row(span.chunk.row).takes_best for span in spans
        ):
            return best_of(logits.values)
        return None

    def _draws(self, row: int, length: int, count: int) -> list[Draw]:
        """Return the parameters with which a row chooses its next `count` tokens, the first after a context of `length`
        tokens.

        The list is empty if the choice depends on more than logits.
        """
        fixed = self._rows.row(row)
        draws = [as_draw(fixed.sampling, length + index, fixed.prompt_len) for index in range(count)]
        known = [draw for draw in draws if draw is not None]
        # Drafts that were drawn at random are also accepted at random.
        by_chance = self._probabilistic and count > 1 and any(draw.temperature for draw in known)
        return known if len(known) == count and not by_chance else []
