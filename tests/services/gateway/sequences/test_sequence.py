from __future__ import annotations

from paceline.core.types import FinishReason, SamplingParams, Token
from paceline.proto import common_pb2
from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.progress import Generated, HandedOver, PromptScores
from paceline.services.gateway.sequences.sequence import SequenceRun
from tests.services.gateway.toy_plans import toy_sequence


def sequence(**sampling: object) -> SequenceRun:
    params = SamplingParams(**{"max_tokens": 4, **sampling})  # type: ignore[arg-type]
    return toy_sequence([1, 2, 3], params, cache_salt="salt", priority=-2)


def tokens(*ids: int) -> list[Token]:
    return [Token(id) for id in ids]


def test_workers_are_told_the_objective() -> None:
    assert sequence().work("model", ttft_seconds=0.5).ttft_seconds == 0.5
    assert sequence().work("model", ttft_seconds=0.0).HasField("ttft_seconds")  # it is missed already
    assert not sequence().work("model").HasField("ttft_seconds")


def test_workers_keep_the_end_of_the_prompt_that_later_prompts_have() -> None:
    assert sequence().work("model").kept_tokens == 3
    own = toy_sequence(dropped_tokens=2)
    assert own.work("model").kept_tokens == 1
    own.note(Generated(tokens(7)), AttemptTrace())
    assert own.work("model").kept_tokens == 0  # the first attempt has kept it
    for fields in ({"background": True}, {"kind": common_pb2.WORK_KIND_SCORE}):
        assert toy_sequence(**fields).work("model").kept_tokens == 0


def test_a_try_goes_on_from_what_has_come() -> None:
    own, attempt_trace = sequence(), AttemptTrace()
    first = own.work("model")
    assert (first.key.request_id, first.key.attempt, first.key.generation) == ("r", 1, 1)
    assert list(first.token_ids) == [1, 2, 3]
    assert (first.model, first.prompt_tokens, first.cache_salt, first.priority) == ("model", 3, "salt", -2)
    assert own.note(Generated(tokens(7)), attempt_trace) == Generated(tokens(7))
    assert own.note(HandedOver(), attempt_trace) == HandedOver()
    own.note(Generated(tokens(8, 9)), attempt_trace)
    second = own.work("model")
    assert second.key.attempt == 2
    assert (list(second.token_ids), second.prompt_tokens) == ([1, 2, 3, 7, 8, 9], 3)
    assert own.progress.generated_before == 3
    assert (attempt_trace.tokens, len(attempt_trace.token_times)) == (3, 2)
    assert attempt_trace.handed_over is not None


def test_scores_are_told_once_and_asked_for_until_all_have_come() -> None:
    own, attempt_trace = sequence(prompt_logprobs=0), AttemptTrace()
    assert own.needs_scores
    assert own.work("model").sampling.HasField("prompt_logprobs")
    assert own.note(PromptScores(1, tokens(2)), attempt_trace) == PromptScores(1, tokens(2))
    again = PromptScores(1, tokens(2, 3))  # the next attempt starts again with the first token
    assert own.note(again, attempt_trace) == PromptScores(2, tokens(3))
    assert own.note(again, attempt_trace) is None
    assert not own.needs_scores
    assert not own.work("model").sampling.HasField("prompt_logprobs")


def test_an_end_that_was_reached_is_known_without_the_worker() -> None:
    own, attempt_trace = sequence(stop_token_ids=frozenset({5})), AttemptTrace()
    assert own.end() is None
    own.note(Generated(tokens(6, 5)), attempt_trace)
    assert own.end() is FinishReason.STOP
    own = sequence()
    own.note(Generated(tokens(6, 5, 6)), attempt_trace)
    assert own.end() is None
    own.note(Generated(tokens(6)), attempt_trace)
    assert own.end() is FinishReason.LENGTH


def test_who_could_not_be_reached_is_named_where_it_is_known() -> None:
    own = sequence()
    assert "no worker has come back" in str(own.unreachable())
