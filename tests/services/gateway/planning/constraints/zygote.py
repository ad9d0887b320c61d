"""A process that has imported what the process for trials imports, and forks one for each gateway of the tests.

To start one by `launch`, as gateways do, takes most of a second, in which it imports. Here it takes milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.services.gateway.planning.constraints import server


class Zygote:
    """Starts processes for trials. The first one starts the zygote itself."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def launch(self, end: socket.socket, told: bytes) -> Started:
        """Start a process as `compiler.launch` does."""
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", __name__, str(theirs.fileno())]
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        with end, tempfile.TemporaryFile() as file:
            file.write(told)
            file.seek(0)
            socket.send_fds(self._socket, [b"x"], [end.fileno(), file.fileno()])
        return Started(int.from_bytes(self._socket.recv(8)))

    def close(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()


class Started:
    """A process of the zygote, which reaps it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        return None if Path(f"/proc/{self.pid}").exists() else -1

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.001)


def main(descriptor: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps
    tests = socket.socket(fileno=descriptor)
    server._warm_up = lambda model: None  # it only saves time, and most gateways of the tests try few constraints
    while True:
        message, descriptors, *_ = socket.recv_fds(tests, 1, 2)
        if not message:
            return
        if (pid := os.fork()) == 0:
            tests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(descriptors[1], 0)
            try:
                server.main(descriptors[0])
            finally:
                os._exit(0)
        for each in descriptors:
            os.close(each)
        tests.sendall(pid.to_bytes(8))


if __name__ == "__main__":
    main(int(sys.argv[1]))
