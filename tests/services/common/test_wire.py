"""Messages that one side encodes have the same meaning on the other side."""

from __future__ import annotations

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.types import Constraint, ConstraintKind, SamplingParams
from paceline.proto import common_pb2 as pb
from paceline.services.common.wire import sampling_from_pb, sampling_to_pb


@pytest.mark.parametrize("kind", ConstraintKind)
def test_a_constraint_travels_with_the_sampling(kind: ConstraintKind) -> None:
    params = SamplingParams(constraint=Constraint(kind, 'a "text" ✓', frozenset({7, 2})), max_tokens=3)
    assert sampling_from_pb(sampling_to_pb(params)) == params
    assert sampling_from_pb(sampling_to_pb(SamplingParams())).constraint is None


def test_a_kind_that_nobody_knows_yet_is_refused() -> None:
    message = pb.Sampling(constraint=pb.Constraint(kind=99, text="x"))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="kind 99"):
        sampling_from_pb(message)
