"""One choice of a request: its text and its outcome, from events of the worker that generates the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.types import Token
from paceline.services.gateway.planning.answers.answer import CallBegin, Content, Part, join_parts
from paceline.services.gateway.planning.answers.parser import AnswerParser
from paceline.services.gateway.planning.plan import Plan
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.gateway.planning.vocabulary import Detokenizer
from paceline.services.gateway.sequences.progress import Ended, Event, Generated, PromptScores
from paceline.services.gateway.sequences.repetition import REPETITION, RepetitionDetector


@dataclass(slots=True)
class Delta:
    """New text and tokens of one choice, and its finish reason if it has ended."""

    index: int
    text: str = ""
    """New text of the content, without reasoning and tool calls."""
    parts: list[Part] = field(default_factory=list)
    """New parts of the answer in their order, content included; [] if the answer is not parsed."""
    reasoning_tokens: int = 0
    tokens: list[Token] = field(default_factory=list)
    answer_tokens: list[Token] = field(default_factory=list)
    """New tokens without those of reasoning and its markers; [] if the answer is not parsed."""
    held: bytes = b""
    """The bytes of the last tokens whose text is in no part yet; b"" without logprobs."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    has_open_call: bool = False
    """Whether the choice has ended within the arguments of a tool call, which then must not be carried out."""
    prompt_scores: list[Token | None] | None = None
    """Logprobs of the prompt: one entry for each token, None for the first token. Only a choice's first delta has
    them, if the request wants them."""

    @property
    def all_parts(self) -> list[Part]:
        """All new parts in their order; the text as one part of content if the answer is not parsed."""
        return self.parts or ([Content(self.text)] if self.text else [])

    def add_parts(self, parts: list[Part]) -> None:
        """Append parts of the answer, and the text of those that are content."""
        self.parts = join_parts([*self.parts, *parts]) if self.parts or len(parts) > 1 else parts
        self.text += "".join(part.text for part in parts if isinstance(part, Content))


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Return consecutive deltas of one choice, at least one, as one. Joining them in pairs takes quadratic time."""
    first, last = deltas[0], deltas[-1]
    # A delta whose text is parsed may still have no parts, but then it has no text either.
    return Delta(
        index=first.index,
        text="".join(delta.text for delta in deltas),
        parts=join_parts([part for delta in deltas for part in delta.parts]),
        reasoning_tokens=sum(delta.reasoning_tokens for delta in deltas),
        tokens=[token for delta in deltas for token in delta.tokens],
        answer_tokens=[token for delta in deltas for token in delta.answer_tokens],
        held=last.held,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        has_open_call=last.has_open_call,
        prompt_scores=next((delta.prompt_scores for delta in deltas if delta.prompt_scores), None),
    )


class Choice:
    """Turns the events of one choice into deltas, and knows its text and its outcome."""

    def __init__(self, index: int, plan: Plan, tokenizer: Tokenizer) -> None:
        prompt = plan.prompts[index // plan.n]
        self.has_ended = False
        self.outcome = "abort"
        self.why = ""
        """A detail of the outcome, for operators; "" if there is none."""
        self.tokens = 0
        self.calls_tools = False
        """Whether the answer has begun a tool call."""
        self.ended_by_text = False
        """Whether the text itself has ended the choice, by a stop string or a repetition. Workers do not know this."""
        self._index = index
        self.undecided: list[Token] = []
        """The last tokens outside of reasoning, which may turn out to be the beginning of a marker of reasoning."""
        self._reasoning_tokens = 0
        """Number of tokens of reasoning that earlier deltas have reported."""
        self._prompt = prompt
        self._eos_token_ids = tokenizer.eos_token_ids
        self._scores: dict[int, Token] = {}
        self._wants_scores = prompt.sampling.prompt_logprobs is not None
        self._detokenizer = Detokenizer(
            tokenizer.vocabulary,
            stop=plan.stop,
            stop_token_ids=prompt.sampling.ending_token_ids,
            include_stop=plan.include_stop,
            skip_special_tokens=plan.skip_special_tokens,
            kept_token_ids=prompt.answer.kept_token_ids if prompt.answer is not None else frozenset(),
            min_tokens=prompt.sampling.min_tokens,
        )
        answer = prompt.answer
        self._parser = AnswerParser(answer.read, answer.new_call_id) if answer is not None else None
        self._repetition = RepetitionDetector(plan.repetition) if plan.repetition is not None else None
        self._min_tokens = prompt.sampling.min_tokens
        self._max_tokens = prompt.sampling.max_tokens

    def take(self, event: Event) -> Delta | None:
        """Return the delta that an event adds to the choice; None if it adds nothing yet."""
        match event:
            case PromptScores(first, tokens):
                self._scores.update(enumerate(tokens, first))
                return None
            case Generated(tokens):
                return self._grow(tokens)
            case Ended(reason):
                return self.end(reason.value)
        return None

    def end(self, reason: str) -> Delta:
        """Return the delta that ends the choice with a finish reason."""
        delta = self._take_scores(Delta(self._index))
        return self._end(reason, delta, self._detokenizer.finish())

    def _grow(self, tokens: list[Token]) -> Delta:
        delta = self._take_scores(Delta(self._index))
        parser = self._parser
        repeats = False
        texts: list[str] = []
        parts: list[Part] = []
        for token in tokens:
            text = self._detokenizer.push(token.id)
            delta.tokens.append(token)
            self.tokens += 1
            if parser is None:
                texts.append(text)
            else:
                parts += self._parse(parser, token, text, delta)
            repeats = self._repetition is not None and self._repetition.push(token.id)
            # As in vLLM, an end token and the longest answer come first.
            repeats = repeats and self._min_tokens <= self.tokens < self._max_tokens
            if repeats or self._detokenizer.stop_reason is not None:
                break
        # All at once, because many tokens may come together.
        delta.text += "".join(texts)
        if parts:
            delta.add_parts(parts)
        stop = self._detokenizer.stop_reason
        self.ended_by_text = isinstance(stop, str) or (repeats and stop is None)
        if isinstance(stop, str):
            return self._end("stop", delta)
        if self.ended_by_text:
            return self._end(REPETITION, delta, self._detokenizer.finish())
        if parser is not None:
            self._count_reasoning(delta, parser)
        if delta.tokens and delta.tokens[-1].logprobs:
            delta.held = (parser.held.encode() if parser is not None else b"") + self._detokenizer.held
        return delta

    def _parse(self, parser: AnswerParser, token: Token, text: str, delta: Delta) -> list[Part]:
        """Return the parts of the answer that the text of the next token makes certain."""
        was_thinking = parser.is_thinking
        parts = parser.push(text)
        self.calls_tools |= any(isinstance(part, CallBegin) for part in parts)
        if was_thinking or parser.is_thinking:
            self.undecided.clear()
            return parts
        self.undecided.append(token)
        if parts:
            delta.answer_tokens += self.undecided
            self.undecided.clear()
        return parts

    def _count_reasoning(self, delta: Delta, parser: AnswerParser) -> None:
        delta.reasoning_tokens = parser.reasoning_tokens - self._reasoning_tokens
        self._reasoning_tokens = parser.reasoning_tokens

    def _end(self, reason: str, delta: Delta, text: str = "") -> Delta:
        """End the choice. Return its last delta, with text that was held back."""
        if self._parser is None:
            delta.text += text
        else:
            is_cut_off = reason != "stop" or isinstance(self._detokenizer.stop_reason, str)
            parts = self._parser.finish(text, is_cut_off, self._detokenizer.cut_off)
            delta.add_parts(parts)
            self.calls_tools |= any(isinstance(part, CallBegin) for part in parts)
            if not self._parser.is_thinking:
                delta.answer_tokens += self.undecided
            delta.has_open_call = self._parser.has_open_call
            self._count_reasoning(delta, self._parser)
        self.has_ended = True
        self.outcome = delta.finish_reason = reason
        stop = self._detokenizer.stop_reason
        if reason == "stop":
            self.why = "a stop string" if isinstance(stop, str) else "a token that ends it"
        delta.stop_reason = None if stop in self._eos_token_ids else stop
        if reason == REPETITION:
            delta.stop_reason = "repetition_detected"
        return delta

    def _take_scores(self, delta: Delta) -> Delta:
        if self._wants_scores:
            self._wants_scores = False
            later = (self._scores.get(position) for position in range(1, len(self._prompt.token_ids)))
            delta.prompt_scores = [None, *later]
        return delta
