"""The gateway's side of constraint trials: starts the process that tries constraints, and remembers the outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from paceline.core import env
from paceline.core.config import GatewayConfig
from paceline.core.errors import BusyError, InvalidRequestError, UnavailableError
from paceline.core.machine import available_cores
from paceline.core.options import parse_bytes
from paceline.core.types import Constraint
from paceline.services.common.tasks import end_tasks
from paceline.services.gateway.http.fair_pool import OwnerTurns
from paceline.services.gateway.planning.constraints.fields import WantedConstraint
from paceline.services.gateway.planning.constraints.server import OWNER_BYTES, READY, TOO_LARGE, TOO_LATE, TrialLimits
from paceline.services.gateway.planning.constraints.trial import read_outcome
from paceline.services.gateway.planning.tokenizer import Tokenizer

Outcome: TypeAlias = Constraint | InvalidRequestError | None
"""Outcome of a trial: the constraint, or the error for its request; None if the answer may have any form."""

_BASE_BYTES = 1 << 10
"""Memory of a remembered outcome besides its texts, in bytes."""

START_SECONDS = 60.0
"""Longest time for the process to start, in seconds. At its start it reads the tokenizers."""
WAIT_SECONDS = 10.0
"""Longest wait of a request until its constraint's trial begins, in seconds. After it, the request gets 429."""
MAX_WAITING = 64
"""Largest number of trials of one owner that wait. The requests of further trials get 429."""
ANSWER_SECONDS = 5.0
"""Seconds after a trial's own limit in which the process must answer. Otherwise it counts as hanging and restarts."""
_SLOWER = 5
"""Largest ratio of a trial's time to its CPU time. The two differ on a busy host."""
_MOST_PLACES = 4
_KNOWN_BYTES = 64 << 20
_OUTCOME_BYTES = 16 << 20
"""Largest size of an outcome in bytes. A grammar has at most some millions of characters."""
_TRIES = 2
"""Largest number of attempts at one trial. A trial is repeated if the process has ended meanwhile."""

log = logging.getLogger(__name__)


class KnownOutcomes:
    """The last outcomes of each owner, up to a sum of bytes. If they exceed it, forget the oldest outcome of the owner
    with the most bytes.

    An owner gets only its own outcomes. Otherwise the time until an answer would tell which constraints others sent.
    """

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._owners: dict[str, OrderedDict[bytes, Outcome]] = {}
        self._bytes: dict[str, int] = {}

    def find(self, owner: str, digest: bytes) -> tuple[Outcome] | None:
        """Return an owner's outcome as a tuple of one; None if it is not known. An outcome itself may be None."""
        own = self._owners.get(owner)
        if own is None or digest not in own:
            return None
        own.move_to_end(digest)
        return (own[digest],)

    def add(self, owner: str, digest: bytes, outcome: Outcome) -> None:
        """Remember an owner's outcome, and forget others if all together are too large."""
        own = self._owners.setdefault(owner, OrderedDict())
        if digest in own:
            return
        own[digest] = outcome
        self._count(owner, _size(outcome))
        while self._left < 0:
            largest = max(self._bytes, key=self._bytes.__getitem__)
            _, oldest = self._owners[largest].popitem(last=False)
            self._count(largest, -_size(oldest))
            if not self._owners[largest]:
                del self._owners[largest], self._bytes[largest]

    def _count(self, owner: str, size: int) -> None:
        self._bytes[owner] = self._bytes.get(owner, 0) + size
        self._left -= size


def _size(outcome: Outcome) -> int:
    if isinstance(outcome, Constraint):
        return _BASE_BYTES + len(outcome.text) + len(outcome.grammar) + sum(map(len, outcome.unenforced))
    return _BASE_BYTES + len(str(outcome))


def about_model(config: GatewayConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the description of a model for the process that tries constraints, as a JSON object."""
    return {
        "tokenizer": str(Path(config.model) / "tokenizer.json"),
        "end_token_ids": sorted(tokenizer.eos_token_ids),
        "added_tokens": tokenizer.vocabulary.added_tokens,
        "own_tokens": tokenizer.vocabulary.own_tokens,
        "tool_call_parser": config.tool_call_parser,
        "reasoning_parser": config.reasoning_parser,
        "template": tokenizer.tool_template_source,
    }


class ConstraintCompiler:
    """Makes the constraints of all models of a gateway in a separate process.

    Args:
        models: the options and the tokenizer of each model.
    """

    def __init__(self, config: GatewayConfig, models: Sequence[tuple[GatewayConfig, Tokenizer]]) -> None:
        seconds = config.constraint_seconds
        self._limits = TrialLimits(seconds, parse_bytes(config.constraint_memory), _SLOWER * seconds)
        self._ends = [tokenizer.eos_token_ids for _, tokenizer in models]
        self._models = [about_model(*model) for model in models]
        self._known = KnownOutcomes(_KNOWN_BYTES)
        self._turns = OwnerTurns(min(available_cores(), _MOST_PLACES))
        self._running: dict[tuple[str, bytes], asyncio.Task[Outcome]] = {}
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._gateway: socket.socket | None = None
        """The gateway's end of the socket to the process; None if the process does not run."""
        self.trials = 0
        """Number of attempts at trials so far."""

    @property
    def pid(self) -> int | None:
        """Operating system's id of the process that tries constraints; None if it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    async def start(self) -> None:
        """Start the process if it does not run, and wait until it can try constraints. Raises UnavailableError."""
        async with self._starting:
            if self.pid is not None:
                return
            self._forget()
            ours, theirs = socket.socketpair()
            self._gateway = ours
            told = json.dumps({"models": self._models, "limits": asdict(self._limits)}).encode()
            try:
                async with asyncio.timeout(START_SECONDS):
                    self._process = await asyncio.to_thread(launch, theirs, told)
                    ours.setblocking(False)
                    answer = await asyncio.get_running_loop().sock_recv(ours, len(READY))
                    if answer != READY:
                        raise ConnectionError("it has ended")
            except OSError as error:  # TimeoutError is one
                self._forget()
                log.error("the process that compiles constraints cannot be started: %s", error)
                message = "constraints cannot be compiled now; the gateway's log says why"
                raise UnavailableError(message) from error

    async def close(self) -> None:
        """End the process. Requests that wait for a trial fail."""
        await end_tasks(*self._running.values())
        async with self._starting:
            self._forget()

    async def make(self, model: int, wanted: WantedConstraint, owner: str) -> Constraint | None:
        """Return a constraint that has been compiled within the limits; None if the answer may have any form.

        Args:
            model: index of the model among the `models` of this compiler.
            wanted: the fields of the request that constrain its answers.
            owner: the owner of the request's key.

        Raises:
            InvalidRequestError: the constraint cannot be enforced. The error names the field.
            BusyError: too many constraints are being compiled.
            UnavailableError: the process cannot be started.
        """
        digest = bytes([model]) + wanted.digest
        if (known := self._known.find(owner, digest)) is None:
            key = owner, digest
            if (task := self._running.get(key)) is None:
                task = self._running[key] = asyncio.create_task(self._outcome(model, wanted, owner), name="constraint")
                task.add_done_callback(lambda done: self._finish(key, done))
            known = (await asyncio.shield(task),)
        (outcome,) = known
        if isinstance(outcome, InvalidRequestError):
            raise InvalidRequestError(str(outcome), outcome.param)  # a new one, because it gets a traceback
        return outcome

    def _finish(self, key: tuple[str, bytes], task: asyncio.Task[Outcome]) -> None:
        del self._running[key]
        if not task.cancelled() and task.exception() is None:
            self._known.add(*key, task.result())

    async def _outcome(self, model: int, wanted: WantedConstraint, owner: str) -> Outcome:
        async with self._place(owner):
            for _ in range(_TRIES):
                await self.start()
                process = self._process
                if outcome := await self._try(model, wanted.fields, owner):
                    break
                if self._process is process:
                    self._forget()
            else:
                raise UnavailableError("the process that compiles constraints ended; try again later")
        if outcome.endswith(TOO_LATE):
            raise BusyError("the server was too busy to compile the constraint; try again later")
        if outcome.endswith(TOO_LARGE) or len(outcome) >= _OUTCOME_BYTES:
            return InvalidRequestError(f"{wanted.place}: {self._too_large()}", wanted.place)
        return await asyncio.to_thread(read_outcome, outcome, self._ends[model])

    @contextlib.asynccontextmanager
    async def _place(self, owner: str) -> AsyncIterator[None]:
        """Hold a place for a trial. Raises BusyError if the owner has too many waiting trials or no place gets free."""
        if self._turns.waiting(owner) >= MAX_WAITING:
            raise BusyError("too many new constraints of this key wait to be compiled; try again later")
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._turns.take(owner)
        except TimeoutError:
            raise BusyError("other constraints are being compiled; try again later") from None
        try:
            yield
        finally:
            self._turns.give_back(owner)

    def _too_large(self) -> str:
        return (
            f"to compile it takes more than {self._limits.cpu_seconds} s or {self._limits.memory >> 20} MiB; make it "
            "smaller: fewer alternatives and levels, smaller counts such as {1000}, other numbers in multipleOf"
        )

    async def _try(self, model: int, fields: bytes, owner: str) -> bytes:
        """Return the outcome of one attempt at a trial, as bytes; b"" if the process has ended or hangs."""
        self.trials += 1
        try:
            async with asyncio.timeout(self._limits.seconds + ANSWER_SECONDS):
                return await self._exchange(model, fields, owner)
        except OSError:  # TimeoutError is one
            return b""

    async def _exchange(self, model: int, fields: bytes, owner: str) -> bytes:
        """Send the fields to the process and return the outcome as bytes. Raises OSError if the process has ended."""
        assert self._gateway is not None
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        message = bytes([model]) + hashlib.blake2b(owner.encode(), digest_size=OWNER_BYTES).digest()
        outcome = bytearray()
        with ours:
            ours.setblocking(False)
            with theirs:
                socket.send_fds(self._gateway, [message], [theirs.fileno()])
            # If the child ends before it has read all, the connection breaks after the reason has come.
            with contextlib.suppress(ConnectionError):
                await loop.sock_sendall(ours, fields)
                ours.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while (part := await loop.sock_recv(ours, 1 << 20)) and len(outcome) < _OUTCOME_BYTES:
                    outcome += part
        return bytes(outcome)

    def _forget(self) -> None:
        """Kill the process and close the socket to it."""
        if self._gateway is not None:
            self._gateway.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._gateway = None


def launch(end: socket.socket, told: bytes) -> subprocess.Popen[bytes]:
    """Start the process that tries constraints, and close this process's copy of its socket.

    Args:
        end: the process's end of the socket.
        told: JSON text for its standard input: the models and the limits.
    """
    # -P: nothing is imported from the working directory.
    command = [sys.executable, "-P", "-m", f"{__package__}.server", str(end.fileno())]
    with end:
        process = subprocess.Popen(
            command,
            env=env.bare_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[end.fileno()],
            start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as told_to:
        told_to.write(told)
    return process
