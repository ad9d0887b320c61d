"""Messages that one side encodes have the same meaning on the other side."""

from __future__ import annotations

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.media import DIGEST_BYTES, MediaInput, MediaKind, MediaSpan
from paceline.core.types import Constraint, ConstraintKind, Logprob, SamplingParams, Token
from paceline.proto import common_pb2 as pb
from paceline.services.common import wire
from paceline.services.common.wire import sampling_from_pb, sampling_of, sampling_to_pb


@pytest.mark.parametrize("kind", ConstraintKind)
def test_a_constraint_travels_with_the_sampling(kind: ConstraintKind) -> None:
    params = SamplingParams(constraint=Constraint(kind, 'a "text" ✓', frozenset({7, 2})), max_tokens=3)
    assert sampling_from_pb(sampling_to_pb(params)) == params
    assert sampling_from_pb(sampling_to_pb(SamplingParams())).constraint is None


def test_constraints_of_requests_with_other_salts_are_others() -> None:
    sampling = sampling_to_pb(SamplingParams(constraint=Constraint(ConstraintKind.REGEX, "a", frozenset({1}))))
    own, again, other = (sampling_of(pb.Work(sampling=sampling, cache_salt=salt)).constraint for salt in "aab")
    assert own == again != other
    assert sampling_of(pb.Work()).constraint is None


def test_a_kind_that_nobody_knows_yet_is_refused() -> None:
    message = pb.Sampling(constraint=pb.Constraint(kind=99, text="x"))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="kind 99"):
        sampling_from_pb(message)


def test_lists_of_tokens_travel_with_the_sampling() -> None:
    params = SamplingParams(bad_words=((1, 2), (3,)), logprob_token_ids=(9, 4), logprobs=0)
    assert sampling_from_pb(sampling_to_pb(params)) == params


def test_many_logprobs_are_sent_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MESSAGE_LOGPROBS", 6)
    tokens = [Token(id, (Logprob(id, -1.0, 1),) * 3) for id in range(5)]
    messages = list(wire.scores_to_pb(7, tokens))
    assert [(message.first, len(message.tokens)) for message in messages] == [(7, 2), (9, 2), (11, 1)]
    assert [token.id for message in messages for token in message.tokens] == [0, 1, 2, 3, 4]


DIGEST = bytes(range(DIGEST_BYTES))
SPANS = (MediaSpan(0, 2, DIGEST, MediaKind.IMAGE, (1, 2, 1)), MediaSpan(2, 1, DIGEST, MediaKind.AUDIO))


def test_media_travel() -> None:
    assert wire.spans_from_pb([wire.span_to_pb(span) for span in SPANS]) == SPANS
    for kind in MediaKind:
        own = MediaInput(kind, 3, "float32", (2, 4), bytes(32))
        assert wire.media_input_from_pb(wire.media_input_to_pb(own)) == own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 1}, "in order and apart"),
        ({"length": 0}, "no token"),
        ({"digest": b"short"}, "16 bytes"),
        ({"kind": 99}, "kind 99"),
    ],
    ids=lambda value: "",
)
def test_spans_that_no_gateway_makes_are_refused(change: dict[str, object], message: str) -> None:
    spans = [wire.span_to_pb(span) for span in SPANS]
    for name, value in change.items():
        setattr(spans[1], name, value)
    with pytest.raises(InvalidRequestError, match=message):
        wire.spans_from_pb(spans)


@pytest.mark.parametrize("grid", [(1, 3), (1, 2, 2), (0, 0, 0), (1, 1, 1, 1)])
def test_a_grid_has_as_many_places_as_its_span_has_tokens(grid: tuple[int, ...]) -> None:
    message = wire.span_to_pb(SPANS[1])
    message.grid.extend(grid)
    with pytest.raises(InvalidRequestError, match="1 tokens has the grid"):
        wire.spans_from_pb([message])
