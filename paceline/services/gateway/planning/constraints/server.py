"""A process that tries constraints for a gateway: `python -m paceline.services.gateway.planning.constraints.server FD`.

Constraints come from clients, and compiling one may take any amount of time and memory. So this process forks children,
which have the model's tokenizer already, and the children compile. If a child exceeds a limit of the system, only this
child is lost. A child serves one owner, and goes on with the owner's next trial if the last one took little time and
memory.
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
"""Bytes of the owner's digest in the message that begins a trial. The digest follows the model's index, one byte."""

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
"""Niceness of a child whose trial takes long. A worker that wants the same core gets nine times its CPU time."""
_SHORT_SECONDS = 0.2
"""Time after which a trial counts as long, in seconds. Nearly all trials end earlier."""
_MOST_IDLE = 4
"""Largest number of children that wait for their owners' next trials."""
_BEGINS, _GOES_ON, _ENDS = b"*", b"+", b"-"
"""Messages of a child: it has taken a trial; a trial has ended and the child takes another one, or takes no other."""


@dataclass(frozen=True, slots=True)
class TrialModel:
    """The parts of one model that trials need."""

    writing: AnswerWriting
    tokenizer: LLTokenizer | str
    """The library's form of the tokenizer, or a sentence that says why the library cannot read it."""

    @staticmethod
    def of(told: dict[str, Any]) -> TrialModel:
        """Return the model from the description that `compiler.about_model` has made."""
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
    """The limits of one trial: CPU time, memory, and time on a clock."""

    cpu_seconds: int
    memory: int
    """Largest growth of the child's address space during a trial, in bytes."""
    seconds: float
    """Largest time of a trial, in seconds, however busy the host is."""


def main(descriptor: int) -> None:
    """Try constraints until the gateway closes the socket. Read the models and the limits from the standard input.

    Args:
        descriptor: of the socket to the gateway.
    """
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
    """Try constraints of the usual kinds. Children then inherit what Python and the library prepare at first use."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": r"^\p{Ll}+$", "maxLength": 9},
            "b": {"anyOf": [{"enum": [1]}]},
        },
        "required": ["a"],
        "additionalProperties": {"type": "array", "items": {"type": "number", "minimum": 0}},
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"name": "x", "parameters": schema}
    for fields in ({"response_format": wanted}, {"functions": [tool], "is_chat": True}, {"guided_regex": r"\d+"}):
        try_constraint(json.dumps(fields).encode(), model.writing, model.tokenizer)


@dataclass(slots=True)
class _Child:
    """A process that tries constraints of one owner, one after the other. Instants: seconds on time.monotonic()."""

    pid: int
    owner: bytes
    control: socket.socket
    """Socket to the child, for the sockets of trials and for the child's messages `_BEGINS`, `_GOES_ON` and `_ENDS`."""
    connection: socket.socket | None = None
    """The socket of the trial that this child has; None if it has no trial."""
    waiting_trial: bytes | None = None
    """Model's index of a trial that the child, which has completed others, has not taken yet; None if there is none."""
    has_worked: bool = False
    """Whether this child has completed a trial."""
    deadline: float = math.inf
    next_look: float = math.inf
    """Instant at which to lower the child's priority; equal to `deadline` after that."""


class _Server:
    """Passes the socket of each trial to a child of the trial's owner, and ends children that exceed their deadline.

    The gateway writes the fields of the trial to the other end of its socket, and reads the outcome from there.
    """

    def __init__(self, gateway: socket.socket, models: list[TrialModel], limits: TrialLimits) -> None:
        self._gateway = gateway
        self._models = models
        self._limits = limits
        self._children: dict[int, _Child] = {}
        """Children by the descriptor of `control`, in the order in which they completed their latest trials."""
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
        """Begin the trial that the gateway sends. Return False if the gateway has closed the socket."""
        message, descriptors, *_ = socket.recv_fds(self._gateway, 1 + OWNER_BYTES, 1)
        if not message:
            return False
        self._begin(message[:1], socket.socket(fileno=descriptors[0]), message[1:])
        return True

    def _begin(self, model: bytes, connection: socket.socket, owner: bytes) -> None:
        """Give a trial to the owner's idle child, or to a new one."""
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
        """Handle a message from a child, or its end: its trial has begun or ended, or it takes no other trial."""
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
        """Kill a child if it still runs. If it leaves a trial without an outcome, tell the gateway why."""
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
        """Try constraints until a trial has taken much memory, or the parent closes its end. Then end this process."""
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
    """Try the constraint whose fields come over a connection, and send the outcome back."""
    fields = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    try:
        outcome = try_constraint(fields, model.writing, model.tokenizer)
    except MemoryError:
        raise
    except Exception as error:  # a bug, which must not pass for a constraint that is too large
        outcome = fault(error)
    connection.sendall(outcome)


def _close(connection: socket.socket) -> None:
    """Shut a connection down and close it. Shutting down is needed because a forked child may have a copy."""
    with connection, contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def prepare_for_trials() -> None:
    """Keep this process from writing files or to stderr, and let the signal of a CPU limit end it."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)  # what the library says before it is killed would fill the gateway's log
    for what in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (0, 0))


def limit_trial(limits: TrialLimits) -> None:
    """Limit the CPU time and memory that this process may use from now on. The limits replace earlier ones."""
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + limits.memory, most))


def _address_space() -> int:
    """Return the size of this process's address space in bytes; 0 if the system has no /proc."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 0


def _end_with_parent() -> None:
    """Have the system kill this process when its parent ends. The parent must have a single thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
