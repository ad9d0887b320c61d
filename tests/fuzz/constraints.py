"""Try random constraints of all forms as a gateway does, and follow those that it would let pass as a worker does.

    python -m tests.fuzz.constraints --model FOLDER --count 100000

Each trial must end within its limits of CPU time and memory. What passes must stay within them at a worker, too, while
it is compiled and while random tokens that its masks allow are written. The exit code is 1 if something does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from pydantic import ValidationError

from paceline.core.errors import PacelineError
from paceline.core.grammar import compile_grammar
from paceline.core.types import Constraint
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.planning.answers.registry import choose_forms
from paceline.services.gateway.planning.constraints.answer import AnswerWriting
from paceline.services.gateway.planning.constraints.fields import chat_fields
from paceline.services.gateway.planning.constraints.server import TrialLimits, limit_trial, prepare_for_trials
from paceline.services.gateway.planning.constraints.trial import read_outcome, try_constraint
from paceline.services.gateway.planning.schemas import ChatRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.fuzz.hostile import Fields, random_fields

LIMITS = TrialLimits(cpu_seconds=2, memory=256 << 20, seconds=20.0)
MASK_SECONDS = 0.5
"""Most CPU time of one mask."""
_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of one constraint."""

    outcome: str
    """"passed", "refused", or "limit" if its trial was ended."""
    trial_seconds: float = 0.0
    worker_seconds: float = 0.0
    """CPU time of compiling it at a worker."""
    mask_seconds: float = 0.0
    """CPU time of its slowest mask."""
    bytes: int = 0
    """Memory that the worker's part took."""

    @property
    def complaint(self) -> str:
        """What is wrong; "" if nothing is."""
        if self.worker_seconds > LIMITS.cpu_seconds or self.bytes > LIMITS.memory:
            return f"a worker needed {self.worker_seconds:.1f} s and {self.bytes >> 20} MiB to compile it"
        if self.mask_seconds > MASK_SECONDS:
            return f"one mask took {self.mask_seconds:.1f} s"
        if self.outcome == "limit" and self.trial_seconds > LIMITS.cpu_seconds + 0.5:
            return f"its trial took {self.trial_seconds:.1f} s"
        return ""


class Bench:
    """Tries constraints for one model, each in a child of this process."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder)
        vocabulary, ends = self.tokenizer.vocabulary, self.tokenizer.eos_token_ids
        self.forms = choose_forms("hermes", "none", "", vocabulary.added_tokens)
        self._writing = AnswerWriting(self.forms, vocabulary.spelling, vocabulary.spelling, ends)
        self._library = LLTokenizer(str(folder / "tokenizer.json"), eos_token=sorted(ends))

    def run(self, fields: Fields, seed: int) -> Seen:
        """Return what becomes of the constraint of a chat with these fields."""
        try:
            request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
            wanted = chat_fields(request, self.forms, self.tokenizer, "")
            told = None if wanted is None else wanted.wanted().fields
        except (ValidationError, ApiError, PacelineError):
            return Seen("refused")
        if told is None:
            return Seen("refused")
        status, answer, seconds = self._in_child(lambda: try_constraint(told, self._writing, self._library))
        if status:
            return Seen("limit", seconds)
        found = read_outcome(answer, self._writing.end_token_ids)
        if not isinstance(found, Constraint):
            return Seen("refused", seconds)
        status, answer, _ = self._in_child(lambda: self._follow(found, seed), is_limited=False)
        own = json.loads(answer) if status == 0 else {"compile": 99.0, "mask": 99.0, "bytes": 1 << 40}
        return Seen("passed", seconds, own["compile"], own["mask"], own["bytes"])

    def _in_child(self, work: Callable[[], bytes], is_limited: bool = True) -> tuple[int, bytes, float]:
        """Return the exit status of a child that does some work, what the work returns, and the child's CPU time."""
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                prepare_for_trials()
                limit_trial(LIMITS if is_limited else TrialLimits(60, 4 << 30, 60.0))
                with os.fdopen(theirs, "wb") as file:
                    file.write(work())
                status = 0
            finally:
                os._exit(status)
        os.close(theirs)
        with os.fdopen(ours, "rb") as file:
            answer = file.read()
        _, status, usage = os.wait4(pid, 0)
        return status, answer, usage.ru_utime + usage.ru_stime

    def _follow(self, constraint: Constraint, seed: int) -> bytes:
        """Compile a constraint as a worker does, write random tokens under it, and return what this took as JSON."""
        memory, begun = _memory(), time.process_time()
        start = compile_grammar(constraint.grammar, self._library, constraint.kind)
        compiled = time.process_time() - begun
        slowest = max(self._masks(start.deep_copy(), seed), default=0.0)
        return json.dumps({"compile": compiled, "mask": slowest, "bytes": _memory() - memory}).encode()

    def _masks(self, matcher: LLMatcher, seed: int) -> Iterator[float]:
        """Yield the CPU time of each mask, with the token that is written after it."""
        rng, ends = np.random.default_rng(seed), sorted(self._writing.end_token_ids)
        for _ in range(_TOKENS):
            begun = time.process_time()
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.setdiff1d(np.flatnonzero(np.unpackbits(mask, bitorder="little")), ends)
            if not matcher.is_error() and len(allowed):
                matcher.consume_token(int(rng.choice(allowed)))
            yield time.process_time() - begun
            if matcher.is_error() or not len(allowed):
                return


def _memory() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.constraints", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model with its tokenizer")
    parser.add_argument("--count", type=int, default=100_000, help="number of constraints")
    parser.add_argument("--first", type=int, default=0, help="number of the first one, which is its seed")
    args = parser.parse_args()
    bench = Bench(args.model)
    outcomes: Counter[tuple[str, str]] = Counter()
    worst = Seen("passed")
    wrong = 0
    for number in range(args.first, args.first + args.count):
        form, fields = random_fields(random.Random(number))
        seen = bench.run(fields, number)
        outcomes[form, seen.outcome] += 1
        worst = Seen(
            "passed",
            *(max(getattr(worst, name), getattr(seen, name)) for name in Seen.__slots__ if name != "outcome"),
        )
        if seen.complaint:
            wrong += 1
            print(f"{number} ({form}): {seen.complaint}: {json.dumps(fields)[:300]}", flush=True)
    for (form, outcome), count in sorted(outcomes.items()):
        print(f"{form:8} {outcome:8} {count}")
    print(
        f"{args.count} constraints, {wrong} wrong; the worst: trial {worst.trial_seconds:.2f} s, worker "
        f"{worst.worker_seconds:.2f} s and {worst.bytes >> 20} MiB, mask {worst.mask_seconds * 1e3:.0f} ms"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
