"""Try random constraints of all forms as a gateway does, and follow those that it would let pass as a worker does.

    python -m tests.fuzz.constraints --model FOLDER --count 100000

Each trial must end within its limits of CPU time and memory. What passes must stay within them at a worker, too, while
it is compiled and while random tokens that its masks allow are written. The exit code is 1 if something does not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

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
from tests.fuzz.hostile import random_fields

Json = dict[str, Any]

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
        if self.trial_seconds > LIMITS.cpu_seconds + 0.5:
            return f"its trial took {self.trial_seconds:.1f} s"
        return ""


class Bench:
    """Tries constraints for one model, in children of this process.

    As at a gateway, a child goes on with the next constraint unless it has reached a limit or has become large.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder)
        vocabulary, ends = self.tokenizer.vocabulary, self.tokenizer.eos_token_ids
        self.forms = choose_forms("hermes", "none", "", vocabulary.added_tokens)
        self._writing = AnswerWriting(self.forms, vocabulary.spelling, vocabulary.spelling, ends)
        self._library = LLTokenizer(str(folder / "tokenizer.json"), eos_token=sorted(ends))
        self._ends = sorted(ends)

    def run(self, numbers: range) -> Iterator[tuple[int, Seen]]:
        """Yield the number of each constraint, which is its seed, and what becomes of it."""
        gc.collect()
        gc.freeze()
        left = deque(numbers)
        while left:
            ours, theirs = os.pipe()
            if (pid := os.fork()) == 0:
                os.close(ours)
                self._run_child(left, theirs)
            os.close(theirs)
            begun: Json = {}
            with os.fdopen(ours) as file:
                for line in file:
                    if "seen" in (told := json.loads(line)):
                        begun = {}
                        yield left.popleft(), Seen(**told["seen"])
                    else:
                        begun = told
            _, status, usage = os.wait4(pid, 0)
            if begun:
                seconds = usage.ru_utime + usage.ru_stime - begun["at"]
                own = Seen("limit", seconds) if begun["trial"] else Seen("passed", 0.0, seconds, 0.0, 1 << 40)
                yield left.popleft(), own
            elif status:
                raise RuntimeError(f"a child ended between two constraints, with the status {status}")

    def _run_child(self, numbers: Iterable[int], descriptor: int) -> None:
        """Try constraints until one has taken much memory. Then end this process."""
        status = 1
        try:
            prepare_for_trials()
            most = _address_space() + LIMITS.memory // 8
            with os.fdopen(descriptor, "w", buffering=1) as file:
                for number in numbers:

                    def begin(is_trial: bool, file: TextIO = file) -> None:
                        limit_trial(LIMITS if is_trial else TrialLimits(60, 4 << 30, 60.0))
                        file.write(json.dumps({"trial": is_trial, "at": time.process_time()}) + "\n")

                    seen = self._seen(number, begin)
                    file.write(json.dumps({"seen": asdict(seen)}) + "\n")
                    if _address_space() > most:
                        break
            status = 0
        finally:
            os._exit(status)

    def _seen(self, number: int, begin: Callable[[bool], None]) -> Seen:
        """Try one constraint. `begin` sets the limits of the trial (True), or of the worker's part."""
        _, fields = random_fields(random.Random(number))
        begin(True)
        started = time.process_time()
        try:
            request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})
            wanted = chat_fields(request, self.forms, self.tokenizer, "")
            told = None if wanted is None else wanted.wanted().fields
        except (ValidationError, ApiError, PacelineError):
            told = None
        if told is None:
            return Seen("refused", time.process_time() - started)
        answer = try_constraint(told, self._writing, self._library)
        seconds = time.process_time() - started
        found = read_outcome(answer, self._writing.end_token_ids)
        if not isinstance(found, Constraint):
            return Seen("refused", seconds)
        begin(False)
        return self._follow(found, number, seconds)

    def _follow(self, constraint: Constraint, seed: int, trial_seconds: float) -> Seen:
        """Compile a constraint as a worker does, and write random tokens under it."""
        memory, begun = _reset_peak(), time.process_time()
        start = compile_grammar(constraint.grammar, self._library, constraint.kind)
        compiled = time.process_time() - begun
        slowest = max(self._masks(start.deep_copy(), seed), default=0.0)
        return Seen("passed", trial_seconds, compiled, slowest, _status("VmHWM") - memory)

    def _masks(self, matcher: LLMatcher, seed: int) -> Iterator[float]:
        """Yield the CPU time of each mask, with the token that is written after it."""
        rng = np.random.default_rng(seed)
        for _ in range(_TOKENS):
            begun = time.process_time()
            mask = matcher.compute_bitmask()
            bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
            bits[self._ends] = 0
            allowed = np.flatnonzero(bits)
            if not matcher.is_error() and len(allowed):
                matcher.consume_token(int(rng.choice(allowed)))
            yield time.process_time() - begun
            if matcher.is_error() or not len(allowed):
                return


def _status(name: str) -> int:
    """Return a figure of this process's memory in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) << 10


def _reset_peak() -> int:
    """Let the peak of this process's memory begin anew, and return its memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _address_space() -> int:
    return _status("VmSize")


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
    for number, seen in bench.run(range(args.first, args.first + args.count)):
        form, fields = random_fields(random.Random(number))
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
