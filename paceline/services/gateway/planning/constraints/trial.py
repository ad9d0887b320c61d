"""The trial of one constraint, in a process that may be killed: made from its fields, and compiled as a worker will."""

from __future__ import annotations

import json
import traceback
from typing import Any

from llguidance import LLTokenizer

from paceline.core.errors import ConstraintError, InvalidRequestError
from paceline.core.grammar import compile_grammar, grammar_of
from paceline.core.types import Constraint, ConstraintKind
from paceline.services.gateway.planning.constraints.answer import AnswerWriting, make_constraint
from paceline.services.gateway.planning.constraints.fields import ConstraintFields

Json = dict[str, Any]


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
            compile_grammar(grammar, tokenizer, constraint.kind)
        except ConstraintError as error:
            raise InvalidRequestError(f"{constraint.place}: {error}", constraint.place) from error
    except InvalidRequestError as error:
        return json.dumps({"error": str(error), "param": error.param}).encode()
    found = {"kind": constraint.kind.value, "text": constraint.text, "grammar": grammar}
    return json.dumps({**found, "place": constraint.place, "unenforced": constraint.unenforced}).encode()


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
