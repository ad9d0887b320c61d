import pytest

from paceline.core import errors
from paceline.core.errors import InvalidRequestError, PacelineError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PacelineError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_its_sentence(kind: type[PacelineError]) -> None:
    assert str(kind("there is no room; make some")) == "there is no room; make some"


def test_a_bad_request_may_name_its_field() -> None:
    assert InvalidRequestError("too long", "prompt").param == "prompt"
    assert InvalidRequestError("too long").param is None
