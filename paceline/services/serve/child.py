"""One child process: start it, read its output, stop it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from paceline.core.errors import ConfigError, PacelineError, UnavailableError

LAST_WORDS = "paceline: "
"""Prefix of the line in which a paceline command gives the reason of its failure."""

_PR_SET_PDEATHSIG = 1
_LINE_BYTES = 1 << 20
_KILL_SECONDS = 5.0


class Child:
    """A process in a session of its own, so that Ctrl-C in the terminal reaches only its parent.

    Its output is passed on line by line, except for its last words, because `failure` repeats them.
    """

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, answer: _Pipe, output: _Pipe, echo: Callable[[str], None]
    ) -> None:
        self.name = name
        self.pid = process.pid
        self.is_ready = False
        self._process = process
        self._answer = answer
        self._output = output
        self._tail: collections.deque[str] = collections.deque(maxlen=20)
        self._listener = asyncio.create_task(self._listen(echo))
        self.exited = asyncio.create_task(self._wait())

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        answers_on: Literal["ready-fd", "stdout", "nothing"],
        echo: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a process.

        Args:
            answers_on: where the process writes a line when it is ready; "ready-fd" is a pipe, passed to it by a flag.
            echo: called with each line of the process's other output.
            environment: environment of the new process; None to inherit the environment of this process.

        Raises:
            ConfigError: the command cannot be executed.
        """
        try:
            with contextlib.ExitStack() as undo, contextlib.ExitStack() as childs_ends:
                answer, output = await _Pipe.open(undo, childs_ends), await _Pipe.open(undo, childs_ends)
                process = await asyncio.create_subprocess_exec(
                    *command,
                    *([f"--ready-fd={answer.writable}"] if answers_on == "ready-fd" else []),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=(answer if answers_on == "stdout" else output).writable,
                    stderr=output.writable,
                    pass_fds=[answer.writable],
                    start_new_session=True,
                    env=environment,
                    preexec_fn=_end_with_parent(),
                )
                undo.pop_all()
        except OSError as error:
            raise ConfigError(f"cannot start {name}: {error}") from error
        return cls(name, process, answer, output, echo)

    async def answer(self, timeout: float) -> str:
        """Wait for the line that the process writes when it is ready, and return this line.

        Raises:
            PacelineError: the process ended, or wrote no line within `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                line = await self._answer.reader.readline()
                if not line:
                    await asyncio.shield(self.exited)
        except TimeoutError:
            raise UnavailableError(f"{self.name} was not ready after {timeout:g} s{self._last_line()}") from None
        if not line:
            raise self.failure()
        self.is_ready = True
        return line.decode().strip()

    def failure(self) -> PacelineError:
        """Return the error for a process that has ended although it should run."""
        code = self._process.returncode or 0
        line = self._last_line()
        if code < 0:
            line = f" by {signal.Signals(-code).name}"
            line += ", as when memory runs out" if code == -signal.SIGKILL else ""
        sentence = f"{self.name} {'ended' if self.is_ready else 'failed'}{line or f' with exit code {code}'}"
        return ConfigError(sentence) if code == 2 else UnavailableError(sentence)

    async def stop(self, grace: float, hurry: asyncio.Event) -> None:
        """Send SIGTERM. After `grace` seconds, or once `hurry` is set, send SIGKILL to the whole session."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({self.exited, hurried}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            await asyncio.wait({self.exited}, timeout=_KILL_SECONDS)

    async def _wait(self) -> int:
        code = await self._process.wait()
        # A grandchild may keep stderr open for longer.
        await asyncio.wait({self._listener}, timeout=1.0)
        self._listener.cancel()
        self._answer.close()
        self._output.close()
        return code

    async def _listen(self, echo: Callable[[str], None]) -> None:
        while True:
            try:
                line = await self._output.reader.readline()
            except ValueError:  # longer than _LINE_BYTES
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text:
                self._tail.append(text)
            if not text.startswith(LAST_WORDS):
                echo(text)

    def _last_line(self) -> str:
        return f": {self._tail[-1].removeprefix(LAST_WORDS)}" if self._tail else ""


class _Pipe:
    """A pipe from a child. Its own end must be closed, because uvloop leaves it open after the other end has closed.

    Subprocesses of asyncio have no way to close their pipes, so a child gets such a pipe for its output, too.
    """

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.BaseTransport, writable: int) -> None:
        self.reader = reader
        self.writable = writable
        """Descriptor of the child's end, which this process closes after the child has been started."""
        self._transport = transport

    @classmethod
    async def open(cls, undo: contextlib.ExitStack, childs_ends: contextlib.ExitStack) -> _Pipe:
        """Open a pipe. Push functions that close this process's end to `undo`, and the child's end to `childs_ends`."""
        readable, writable = os.pipe()
        childs_ends.callback(os.close, writable)
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        file = os.fdopen(readable, "rb", buffering=0)
        undo.callback(file.close)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, file)
        undo.callback(transport.close)
        return cls(reader, transport, writable)

    def close(self) -> None:
        self._transport.close()


def _end_with_parent() -> Callable[[], None] | None:
    """Return a function for a child to call before its program, so that it gets SIGTERM when this process ends.

    This works even if this process is killed. Returns None if the system is not Linux.
    """
    if sys.platform != "linux":
        return None
    # Look this up before the fork, because a child should do as little as possible before its program.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def set_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(0)

    return set_signal
