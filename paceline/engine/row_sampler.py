"""Choosing the tokens of a step's rows, and accepting drafts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.core.types import Token
from paceline.engine.constraint import Constraints
from paceline.engine.rows import Rows
from paceline.engine.sampler import as_draw, best_of, sample
from paceline.engine.step import Chunk
from paceline.kernels.choosing import Draw, TokenChooser
from paceline.kernels.interface import Logits


class RowSampler:
    """Chooses tokens from logits: for many rows in one call if logits alone decide, otherwise row by row.

    Args:
        probabilistic: accept drafts as often as the distribution allows, by random numbers of their own. Otherwise,
            accept only the tokens that would have been sampled without drafts, so that outputs are the same.
        chooser: chooses tokens of all rows in one call, if they depend on logits alone.
    """

    def __init__(self, rows: Rows, constraints: Constraints, chooser: TokenChooser | None, probabilistic: bool) -> None:
        self._rows = rows
        self._constraints = constraints
        self._chooser = chooser
        self._probabilistic = probabilistic

    def choose(
        self,
        logits: Logits,
        inputs: Tensor,
        chunks: Sequence[Chunk],
        lengths: Sequence[int],
        counts: Sequence[int],
    ) -> dict[int, list[int]]:
        """Choose tokens for the rows in which logits alone decide, all in one call.

        Args:
            logits: of all chunks that sample, `counts[i]` rows for each.
            inputs: int64 [rows]: the input token of each row of logits.
            lengths: [chunks]: tokens of the context after which the first row of logits chooses.

        Returns:
            For each of these rows of the device's state, the accepted drafts and the token after them.
        """
        best = self._best(logits, chunks)
        chosen: dict[int, list[int]] = {}
        draws: list[Draw] = []
        drawing: list[int] = []
        places: list[int] = []
        first_draws, first = [0], 0
        for chunk, length, count in zip(chunks, lengths, counts):
            if not chunk.samples:
                continue
            if best is not None and self._rows.row(chunk.row).takes_best:
                chosen[chunk.row] = best[first : first + count]
            elif self._chooser is not None and (own := self._draws(chunk.row, length, count)):
                draws += own
                drawing.append(chunk.row)
                places += range(first, first + count)
                first_draws.append(len(draws))
            first += count
        if self._chooser is not None and draws:
            tokens = self._chooser.choose(logits.values, places, draws)
            if len(draws) > len(drawing):
                drafts = inputs[places] if len(places) < len(inputs) else inputs
                accepted = self._chooser.accept(tokens, drafts, first_draws).tolist()
                chosen |= {row: [token for token in own if token >= 0] for row, own in zip(drawing, accepted)}
            else:
                chosen |= {row: [token] for row, token in zip(drawing, tokens.tolist())}
        return chosen

    def verify(
        self, logits: Tensor, own: range, row: int, length: int, chosen: Sequence[int] | None
    ) -> tuple[list[Token], int]:
        """Sample tokens until one differs from its draft. Return the tokens, and how many of them are drafts.

        A draft that the grammar forbids is never sampled, so no mask is needed after it. If the grammar allows a draft
        but no token after it, there is no mask after it either; then the next step raises GrammarError.

        Args:
            logits: fp32 [rows, vocab] of all chunks of the step.
            own: rows of logits of this chunk, 1 + drafts. The first one chooses the token after `length` tokens.
            chosen: the accepted drafts and the token after them, if `choose` has chosen them; None to sample here.

        Raises:
            GrammarError: the row has a grammar, and it allows no token.
        """
        state, fixed = self._rows, self._rows.row(row)
        if not own:
            return [], 0
        tokens: list[Token] = []
        masks, drafts = self._constraints.masks(row), state.drafts_of(row)
        for index in range(len(own) if masks is None else min(len(masks), len(own))):
            draft = drafts[index] if index + 1 < len(own) else None
            if chosen is not None:
                token = Token(chosen[index])
            else:
                mask = masks[index] if masks is not None else fixed.allowed
                how = state.sampling_row(row, length + index, mask)
                token = sample(logits[own[index]], how, draft if self._probabilistic else None, self._chooser)
            tokens.append(token)
            is_draft = draft is not None and token.id == draft.token
            ended = fixed.ends(token.id, length + len(tokens))
            if ended or not is_draft:
                break
        state.append(row, [token.id for token in tokens], ended)
        return tokens, len(tokens) - (not is_draft)

    def _best(self, logits: Logits, chunks: Sequence[Chunk]) -> list[int] | None:
        """Return the best token of each row of logits; None if no chunk needs it, or if the chooser will find it."""
        if logits.best is not None:
            best: list[int] = logits.best.tolist()
            return best
        if self._chooser is None and any(chunk.samples and self._rows.row(chunk.row).takes_best for chunk in chunks):
            return best_of(logits.values)
        return None

    def _draws(self, row: int, length: int, count: int) -> list[Draw]:
        """Return how a row chooses its next `count` tokens, the first after a context of `length` tokens.

        The list is empty if the choice depends on more than logits.
        """
        fixed = self._rows.row(row)
        draws = [as_draw(fixed.sampling, length + index, fixed.prompt_len) for index in range(count)]
        known = [draw for draw in draws if draw is not None]
        # Drafts that were drawn at random are also accepted at random.
        by_chance = self._probabilistic and count > 1 and any(draw.temperature for draw in known)
        return known if len(known) == count and not by_chance else []
