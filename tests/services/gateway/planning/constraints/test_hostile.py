"""A sample of the fuzz of constraints: all forms, within the limits of a trial, and of a worker if they pass."""

from __future__ import annotations

import random
from pathlib import Path

from tests.fuzz.constraints import Bench
from tests.fuzz.hostile import random_fields
from tests.services.gateway.toy_model import write_toy_model


def test_hostile_constraints_stay_within_their_limits(tmp_path: Path) -> None:
    bench = Bench(write_toy_model(tmp_path / "toy"))
    outcomes, forms, numbers = set(), set(), []
    for number, seen in bench.run(range(40)):
        form, _ = random_fields(random.Random(number))
        assert not seen.complaint, (number, form, seen)
        forms.add(form)
        outcomes.add(seen.outcome)
        numbers.append(number)
    assert numbers == list(range(40))
    assert len(forms) == 7
    assert outcomes >= {"passed", "refused"}
