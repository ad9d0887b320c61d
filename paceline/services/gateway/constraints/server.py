"""A process that tries constraints for a gateway: `python -m paceline.services.gateway.constraints.server FD`.

Constraints come from clients, and to compile one may take any amount of time and memory. So each trial has a child of
this process, which is forked from it and has the model's tokenizer already. Limits of the system end the child, and
nothing else is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from llguidance import LLTokenizer

from paceline.services.gateway.answers.expressions import Spelling
from paceline.services.gateway.answers.registry import choose_forms
from paceline.services.gateway.constraints.answer import AnswerWriting
from paceline.services.gateway.constraints.trial import fault, try_constraint

READY, TOO_LARGE, TOO_LATE = b"ready", b"too large", b"too late"
"""Messages to the gateway: the process can try constraints; a trial has exceeded a limit; a trial was not done in time,
because the host is busy."""

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
"""Workers of the same host get nine times the CPU time of a trial that takes long, if both want it."""
_SHORT_SECONDS = 0.2
"""A trial takes long after this time. Nearly all end before."""


@dataclass(frozen=True, slots=True)
class TrialModel:
    """What trials of one model need."""

    writing: AnswerWriting
    tokenizer: LLTokenizer | str
    """A sentence if the library cannot read the model's tokenizer."""

    @staticmethod
    def of(told: dict[str, Any]) -> TrialModel:
        """Return the model that a gateway has told about; see `compiler.about_model`."""
        ends, added = frozenset(told["end_token_ids"]), told["added_tokens"]
        forms = choose_forms(told["tool_call_parser"], told["reasoning_parser"], told["template"], added)
        writing = AnswerWriting(forms, Spelling(told["own_tokens"]), Spelling(added), ends)
        try:
            with open(told["tokenizer"], encoding="utf-8") as file:
                return TrialModel(writing, LLTokenizer(file.read(), eos_token=sorted(ends)))
        except (ValueError, OSError) as error:
            return TrialModel(writing, f"this model's answers cannot be constrained: {error}")


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What one trial may use."""

    cpu_seconds: int
    memory: int
    """Bytes of address space beside those of this process."""
    seconds: float
    """Time in which a trial must end on a busy host, too."""


def main(descriptor: int) -> None:
    """Try constraints until the gateway closes the socket. The standard input says of which models."""
    told = json.load(sys.stdin)
    models = [TrialModel.of(each) for each in told["models"]]
    limits = TrialLimits(**told["limits"])
    for model in models:
        _warm_up(model)
    gc.collect()
    gc.freeze()  # so that children do not copy memory in order to count references
    gateway = socket.socket(fileno=descriptor)
    gateway.sendall(READY)
    _Server(gateway, models, limits).run()


def _warm_up(model: TrialModel) -> None:
    """Try constraints of the usual kinds, so that no child makes what Python and the library make at first use."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9}, "b": {"anyOf": [{"enum": [1]}]}},
        "required": ["a"],
        "additionalProperties": {"type": "array", "items": {"type": "number", "minimum": 0}},
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"name": "x", "parameters": schema}
    for fields in ({"response_format": wanted}, {"functions": [tool], "is_chat": True}, {"guided_regex": r"\d+"}):
        try_constraint(json.dumps(fields).encode(), model.writing, model.tokenizer)


@dataclass(slots=True)
class _Trial:
    """A running child. Instants are of time.monotonic()."""

    pid: int
    connection: socket.socket
    deadline: float
    next_look: float
    """When to lower its priority, and then the deadline."""


class _Server:
    """Forks a child for each socket that comes from the gateway, and ends children that are late.

    The gateway writes the fields to the other end of the socket, and reads the outcome until the end.
    """

    def __init__(self, gateway: socket.socket, models: list[TrialModel], limits: TrialLimits) -> None:
        self._gateway = gateway
        self._models = models
        self._limits = limits
        self._trials: dict[int, _Trial] = {}
        """By the end of a pipe that the child closes when it ends."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(gateway, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            first = min((min(trial.next_look, trial.deadline) for trial in self._trials.values()), default=None)
            left = None if first is None else max(0.0, first - time.monotonic())
            for key, _ in self._selector.select(left):
                if key.fileobj is not self._gateway:
                    self._end(key.fd)
                elif not self._accept():
                    return
            now = time.monotonic()
            for end, trial in [*self._trials.items()]:
                if trial.deadline <= now:
                    os.kill(trial.pid, signal.SIGKILL)
                    self._end(end, TOO_LATE)
                elif trial.next_look <= now:
                    os.setpriority(os.PRIO_PROCESS, trial.pid, _NICENESS)
                    trial.next_look = trial.deadline

    def _accept(self) -> bool:
        """Begin a trial. Return False if the gateway has closed the socket."""
        message, descriptors, *_ = socket.recv_fds(self._gateway, 1, 1)
        if not message:
            return False
        connection = socket.socket(fileno=descriptors[0])
        ours, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            self._run_child(connection, self._models[message[0]])
        os.close(theirs)
        now = time.monotonic()
        self._trials[ours] = _Trial(pid, connection, now + self._limits.seconds, now + _SHORT_SECONDS)
        self._selector.register(ours, selectors.EVENT_READ)
        return True

    def _end(self, end: int, reason: bytes = TOO_LARGE) -> None:
        """Take leave of a child that ends. If it has not succeeded, tell the gateway why."""
        trial = self._trials.pop(end)
        self._selector.unregister(end)
        os.close(end)
        _, status = os.waitpid(trial.pid, 0)
        with trial.connection as connection, contextlib.suppress(OSError):
            if status:
                connection.setblocking(False)
                connection.sendall(reason)
            connection.shutdown(socket.SHUT_RDWR)  # a child that was forked meanwhile has the socket, too

    def _run_child(self, connection: socket.socket, model: TrialModel) -> None:
        """Try the constraint that comes over the connection, and end this process."""
        status = 1
        try:
            _end_with_parent()
            self._gateway.close()
            limit_process(self._limits)
            fields = b"".join(iter(lambda: connection.recv(1 << 20), b""))
            try:
                outcome = try_constraint(fields, model.writing, model.tokenizer)
            except MemoryError:
                raise
            except Exception as error:  # a bug, which must not pass for a constraint that is too large
                outcome = fault(error)
            connection.sendall(outcome)
            connection.shutdown(socket.SHUT_WR)
            status = 0
        finally:
            os._exit(status)


def limit_process(limits: TrialLimits) -> None:
    """Limit what this process may use from now on."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)  # what the library says before it is killed would fill the gateway's log
    size = 0
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    for what, limit in (
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_AS, size + limits.memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (limit, limit))


def _end_with_parent() -> None:
    """Have the system kill this process when its parent, which has one thread, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
