"""The decode loop with constrained requests, on a model whose tokens are bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.context import Context
from paceline.core.types import Constraint, ConstraintKind, FinishReason, Key, SamplingParams
from paceline.engine.constraint import Grammars
from paceline.engine.request import Request
from paceline.engine.step import Failed, Removed, Sampled
from paceline.models.base import Model
from tests.engine.loops import MAX_TOKENS, Loop
from tests.services.gateway.toy_model import END

ENDS = frozenset({END})
WAYS = [(1, "none"), (2, "none"), (1, "lookup"), (2, "lookup"), (2, "early")]


def schema(value: object, **options: object) -> Constraint:
    """Return a constraint to compact JSON under a schema, so that outputs are short."""
    text = json.dumps({**value, "x-guidance": {"whitespace_flexible": False, **options}})  # type: ignore[dict-item]
    return Constraint(ConstraintKind.JSON_SCHEMA, text, ENDS)


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text, ENDS)


def lark(text: str) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, text, ENDS)


def choice(*texts: str) -> Constraint:
    return Constraint(ConstraintKind.CHOICE, json.dumps(texts), ENDS)


@dataclass
class Answer:
    """One output. Its tokens are bytes, except for the end token."""

    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    failure: str = ""
    logprobs: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        assert self.reason is FinishReason.STOP, self
        assert self.tokens[-1] == END
        return bytes(self.tokens[:-1]).decode()


@dataclass(frozen=True)
class Ask:
    sampling: SamplingParams
    prompt: str = 'abc {"a": [1, 2], "b": "aaa"} abc'
    output: tuple[int, ...] = ()
    """Tokens that an earlier attempt has generated."""
    only_first_token: bool = False


class ConstrainedLoop(Loop):
    """A loop whose requests may have constraints. Its vocabulary is the toy tokenizer's, padded."""

    def __init__(self, model: Model, grammars: Grammars, steps_in_flight: int = 2, drafter: str = "lookup") -> None:
        super().__init__(model, steps_in_flight, drafter, grammars=grammars)

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """Run requests at the same time and return their answers."""
        answers = {Key(str(index), 1, 1): Answer() for index in range(len(asks))}
        for key, ask in zip(answers, asks):
            self.engine.add(self._request(key, ask))
        left = set(answers)
        while left:
            event = self._events.get(timeout=120)
            assert not self._failures
            if isinstance(event, Sampled):
                answer = answers[event.key]
                answer.tokens.append(event.token.id)
                answer.logprobs.append(event.token.logprobs)
                answer.reason = event.reason
                if event.reason is not None or asks[int(event.key.request_id)].only_first_token:
                    self.engine.remove(event.key)
            elif isinstance(event, Failed):
                answers[event.key].failure = str(event.error)
                self.engine.remove(event.key)
            elif isinstance(event, Removed):
                left.remove(event.key)
        return list(answers.values())

    def _request(self, key: Key, ask: Ask) -> Request:
        tables = [[self._slots.pop() for _ in range(g.blocks_for(MAX_TOKENS))] for g in self.layout.groups]
        prompt = list(ask.prompt.encode())
        return Request(
            key=key,
            context=Context([*prompt, *ask.output]),
            prompt_len=len(prompt),
            sampling=ask.sampling,
            layout=self.layout,
            tables=tables,
            only_first_token=ask.only_first_token,
        )


def sampled(constraint: Constraint | None, max_tokens: int = 200, **params: Any) -> SamplingParams:
    stops = params.pop("stop_token_ids", ENDS)
    return SamplingParams(constraint=constraint, max_tokens=max_tokens, stop_token_ids=stops, **params)


def answers_of_all_ways(model: Model, grammars: Grammars, asks: list[Ask]) -> list[Answer]:
    """Return the answers, and check that they are the same in all ways to run the loop."""
    found = []
    for steps_in_flight, drafter in WAYS:
        loop = ConstrainedLoop(model, grammars, steps_in_flight, drafter)
        found.append(loop.answer(asks))
        loop.engine.stop()
    for other in found[1:]:
        assert [answer.tokens for answer in other] == [answer.tokens for answer in found[0]]
        assert [answer.reason for answer in other] == [answer.reason for answer in found[0]]
    return found[0]
