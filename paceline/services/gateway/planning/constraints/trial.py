"""The trial of one constraint, in a process that may be killed: made from its fields, and compiled as a worker will."""

from __future__ import annotations

import json
import random
import time
import traceback
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from paceline.core.errors import ConstraintError, InvalidRequestError
from paceline.core.grammar import compile_grammar, grammar_of
from paceline.core.grammar_errors import cannot_go_on, explain
from paceline.core.types import Constraint, ConstraintKind
from paceline.services.gateway.planning.constraints.answer import AnswerWriting, make_constraint
from paceline.services.gateway.planning.constraints.fields import ConstraintFields

Json = dict[str, Any]

_WALKS, _WALK_TOKENS = 4, 16
"""Number of random answers of which each trial follows the beginning, and number of their tokens."""
_WALK_SECONDS = 0.3
"""CPU time after which they are not followed any further, in seconds."""


def try_constraint(fields: bytes, writing: AnswerWriting, tokenizer: LLTokenizer | str) -> bytes:
    """Return the outcome of making and compiling a constraint, for `read_outcome`.

    Args:
        fields: `ConstraintFields` as JSON.
        tokenizer: the library's form of the model's tokenizer, or a sentence that says why there is none.
    """
    try:
        constraint = make_constraint(ConstraintFields.model_validate_json(fields), writing)
        if constraint is None:
            return b"{}"
        grammar = grammar_of(constraint.kind, constraint.text)
        try:
            if isinstance(tokenizer, str):
                raise ConstraintError(tokenizer)
            check_beginnings(compile_grammar(grammar, tokenizer, constraint.kind), constraint.kind)
        except ConstraintError as error:
            raise InvalidRequestError(f"{constraint.place}: {error}", constraint.place) from error
    except InvalidRequestError as error:
        return json.dumps({"error": str(error), "param": error.param}).encode()
    found = {"kind": constraint.kind.value, "text": constraint.text, "grammar": grammar}
    return json.dumps({**found, "place": constraint.place, "unenforced": constraint.unenforced}).encode()


def check_beginnings(start: LLMatcher, kind: ConstraintKind) -> None:
    """Raise ConstraintError if the beginning of an answer exceeds a limit of the library, or makes it fail.

    A worker would find this in the middle of an answer. The beginnings are those of a few random answers. One that
    cannot go on is no error here, because the model may never write it.

    Args:
        start: the matcher at the beginning of an answer.
    """
    rng = random.Random(0)
    end = time.process_time() + _WALK_SECONDS
    for _ in range(_WALKS):
        matcher = start.deep_copy()
        for _ in range(_WALK_TOKENS):
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if matcher.is_error() or matcher.is_stopped() or not len(allowed) or time.process_time() > end:
                break
            matcher.consume_token(int(allowed[rng.randrange(len(allowed))]))
        if matcher.is_error() and not cannot_go_on(message := matcher.get_error()):
            raise ConstraintError(explain(message, with_place=kind is ConstraintKind.GRAMMAR))


def fault(error: Exception) -> bytes:
    """Return the outcome, as bytes, of a trial that has failed by an unexpected error."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return json.dumps({"fault": f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"}).encode()


def read_outcome(outcome: bytes, end_token_ids: frozenset[int]) -> Constraint | InvalidRequestError | None:
    """Return the constraint or the error for its request from an outcome; None if the answer may have any form.

    Args:
        outcome: bytes from `try_constraint`.
        end_token_ids: ids of the tokens with which the model ends an answer.

    Raises:
        RuntimeError: the trial has failed by an unexpected error.
        ValueError, KeyError, TypeError: the bytes are no outcome.
    """
    told: Json = json.loads(outcome)
    if not told:
        return None
    if "fault" in told:
        raise RuntimeError(f"the trial of a constraint failed: {told['fault']}")
    if "error" in told:
        return InvalidRequestError(str(told["error"]), told["param"])
    return Constraint(
        ConstraintKind(told["kind"]),
        str(told["text"]),
        end_token_ids,
        str(told["place"]),
        tuple(map(str, told["unenforced"])),
        str(told["grammar"]),
    )
