"""A process that tries constraints for a gateway: `python -m paceline.services.gateway.planning.constraints.server FD`.

Constraints come from clients, and to compile one may take any amount of time and memory. So a child of this process
does it, which is forked from it and has the model's tokenizer already. Limits of the system end the child, and nothing
else is lost. A child serves one owner, and goes on with the owner's next trial if the last one took little.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
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

from paceline.services.gateway.planning.answers.expressions import Spelling
from paceline.services.gateway.planning.answers.registry import choose_forms
from paceline.services.gateway.planning.constraints.answer import AnswerWriting
from paceline.services.gateway.planning.constraints.trial import fault, try_constraint

READY, TOO_LARGE, TOO_LATE = b"ready", b"too large", b"too late"
"""Messages to the gateway: the process can try constraints; a trial has exceeded a limit; a trial was not done in time,
because the host is busy, or the system has ended it, because the host's memory is full."""

OWNER_BYTES = 16
"""Size of an owner's digest in the message that begins a trial, after the byte of the model's index."""

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
"""Workers of the same host get nine times the CPU time of a trial that takes long, if both want it."""
_SHORT_SECONDS = 0.2
"""A trial takes long after this time. Nearly all end before."""
_MOST_IDLE = 4
"""Children that wait for their owners' next trials."""
_BEGINS, _GOES_ON, _ENDS = b"*", b"+", b"-"
"""What a child says: that it has taken a trial; and at the trial's end, whether it takes another one."""


@dataclass(frozen=True, slots=True)
class TrialModel:
    """The parts of one model that trials need."""

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
    """The limits of one trial."""

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
class _Child:
    """A process that tries constraints of one owner, one after the other. Instants are of time.monotonic()."""

    pid: int
    owner: bytes
    control: socket.socket
    """Takes the sockets of trials to the child, which answers as `_BEGINS` and the others say."""
    connection: socket.socket | None = None
    """The socket of the trial that runs; None if none runs."""
    waiting_trial: bytes | None = None
    """The model's index of a trial that the child, which has worked before, has not taken yet; None if none is."""
    has_worked: bool = False
    """Whether it has ended a trial."""
    deadline: float = math.inf
    next_look: float = math.inf
    """When to lower its priority, and then the deadline."""


class _Server:
    """Gives each socket that comes from the gateway to a child of its owner, and ends children that are late.

    The gateway writes the fields to the other end of the socket, and reads the outcome until the end.
    """

    def __init__(self, gateway: socket.socket, models: list[TrialModel], limits: TrialLimits) -> None:
        self._gateway = gateway
        self._models = models
        self._limits = limits
        self._children: dict[int, _Child] = {}
        """By descriptors of `control`. The child that has ended a trial last is the last one."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(gateway, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            first = min((min(child.next_look, child.deadline) for child in self._children.values()), default=math.inf)
            left = None if first == math.inf else max(0.0, first - time.monotonic())
            events = self._selector.select(left)
            for key, _ in sorted(events, key=lambda event: event[0].fileobj is self._gateway):  # children first
                if key.fileobj is not self._gateway:
                    self._hear(self._children[key.fd])
                elif not self._accept():
                    return
            now = time.monotonic()
            for child in [*self._children.values()]:
                if child.deadline <= now:
                    self._end(child)
                elif child.next_look <= now:
                    os.setpriority(os.PRIO_PROCESS, child.pid, _NICENESS)
                    child.next_look = child.deadline

    def _accept(self) -> bool:
        """Begin a trial. Return False if the gateway has closed the socket."""
        message, descriptors, *_ = socket.recv_fds(self._gateway, 1 + OWNER_BYTES, 1)
        if not message:
            return False
        self._begin(message[:1], socket.socket(fileno=descriptors[0]), message[1:])
        return True

    def _begin(self, model: bytes, connection: socket.socket, owner: bytes) -> None:
        """Give a trial to a child."""
        idle = [child for child in self._children.values() if child.connection is None]
        child = next((each for each in idle if each.owner == owner), None)
        if child is None:
            if len(idle) >= _MOST_IDLE:
                self._end(idle[0])
            child = self._fork(owner)
        now = time.monotonic()
        child.connection = connection
        child.waiting_trial = model if child.has_worked else None
        child.deadline, child.next_look = now + self._limits.seconds, now + _SHORT_SECONDS
        with contextlib.suppress(OSError):  # if the child has been killed, its end is heard
            socket.send_fds(child.control, [model], [connection.fileno()])

    def _fork(self, owner: bytes) -> _Child:
        ours, theirs = socket.socketpair()
        if (pid := os.fork()) == 0:
            ours.close()
            self._run_child(theirs)
        theirs.close()
        child = self._children[ours.fileno()] = _Child(pid, owner, ours)
        self._selector.register(ours, selectors.EVENT_READ)
        return child

    def _hear(self, child: _Child) -> None:
        """Take leave of a trial that has ended, or of its child. Note that a trial has begun."""
        said, was_slow = b"", child.next_look == child.deadline
        with contextlib.suppress(OSError):
            said = child.control.recv(1)
        if said == _BEGINS:
            child.waiting_trial = None
            return
        if not said and child.connection is not None and (model := child.waiting_trial) is not None:
            # The system ended the child while it waited for this trial. A new child takes it.
            connection, child.connection = child.connection, None
            self._end(child)
            self._begin(model, connection, child.owner)
            return
        if said and child.connection is not None:
            _close(child.connection)
            child.connection, child.deadline, child.next_look = None, math.inf, math.inf
            child.has_worked = True
            self._children[child.control.fileno()] = self._children.pop(child.control.fileno())
        if said != _GOES_ON or was_slow:  # what has a low priority keeps it
            self._end(child)

    def _end(self, child: _Child) -> None:
        """End a child if it has not ended. If its trial has not succeeded, tell the gateway why."""
        del self._children[child.control.fileno()]
        self._selector.unregister(child.control)
        child.control.close()
        os.kill(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        if child.connection is not None:
            if status:
                # None of a child's own limits sends SIGKILL.
                was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                child.connection.setblocking(False)
                with contextlib.suppress(OSError):
                    child.connection.sendall(TOO_LATE if was_killed else TOO_LARGE)
            _close(child.connection)

    def _run_child(self, control: socket.socket) -> None:
        """Try constraints until one takes much, or until the parent closes the other end. Then end this process."""
        status = 1
        try:
            _end_with_parent()
            self._gateway.close()
            for other in self._children.values():
                other.control.close()
                if other.connection is not None:
                    other.connection.close()
            prepare_for_trials()
            most, goes_on = _address_space() + self._limits.memory // 8, True
            while goes_on:
                message, descriptors, *_ = socket.recv_fds(control, 1, 1)
                if not message:
                    break
                control.sendall(_BEGINS)
                limit_trial(self._limits)
                with socket.socket(fileno=descriptors[0]) as connection:
                    _try(self._models[message[0]], connection)
                goes_on = _address_space() <= most
                control.sendall(_GOES_ON if goes_on else _ENDS)  # before its slow end, so that it gets no other trial
            status = 0
        finally:
            os._exit(status)


def _try(model: TrialModel, connection: socket.socket) -> None:
    """Try the constraint that comes over a connection, and send the outcome."""
    fields = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    try:
        outcome = try_constraint(fields, model.writing, model.tokenizer)
    except MemoryError:
        raise
    except Exception as error:  # a bug, which must not pass for a constraint that is too large
        outcome = fault(error)
    connection.sendall(outcome)


def _close(connection: socket.socket) -> None:
    """Close a connection, of which a child that was forked meanwhile may have a copy."""
    with connection, contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def prepare_for_trials() -> None:
    """Have this process write no file and say nothing, and let it end where a limit is exceeded."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)  # what the library says before it is killed would fill the gateway's log
    for what in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (0, 0))


def limit_trial(limits: TrialLimits) -> None:
    """Limit what this process may use from now on. These limits take the place of earlier ones."""
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + limits.memory, most))


def _address_space() -> int:
    """Return the size of this process's address space in bytes; 0 where the system does not tell it."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 0


def _end_with_parent() -> None:
    """Have the system kill this process when its parent, which has one thread, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
