"""`paceline run-batch`: answer the requests of a file, on a stack that the command starts or on a running one.

The work is that of `/v1/files` and `/v1/batches`, so this command only uploads, waits and downloads. It makes a batch
for each URL that lines name. A line that cannot be in a batch gets an error, and the other lines are answered. In a
batch, the id of a line is its number, so that ids in the file may be missing or equal.

A batch has a digest of its input in its metadata. A command that was ended and runs again finds the batch by this
digest and continues it. The digest is made with the API key, because an admin sees the batches of all keys.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.client import GatewayClient
from paceline.core.env import child_command
from paceline.core.errors import ConfigError, InvalidRequestError, UnavailableError
from paceline.core.private_folder import make_private_folder
from paceline.models.files.durable import rename_durably
from paceline.services.gateway.api.batches.batch import ENDPOINTS
from paceline.services.gateway.api.batches.lines import InvalidLineError, error_line, read_line

POLL_SECONDS = 0.5
START_SECONDS = 86400.0
"""Longest time until the stack that this command starts serves, in seconds. It may have to download the model."""
REQUEST_SECONDS = 120.0
AWAY_SECONDS = 60.0
"""Seconds for which a gateway that does not answer is asked again. Then the command ends, and can be run again."""
DIGEST = "paceline_input"
"""Key of the metadata with the digest of the input."""
ANSWERED = ("completed", "expired")
"""States in which a batch has one output line for each input line. If it expired, some output lines are errors."""
ENDED = (*ANSWERED, "failed", "cancelled")

Json = dict[str, Any]


def run_batch(
    source: Path, target: Path, model: str, gateway: GatewayClient, window: str, flags: Sequence[str]
) -> bool:
    """Answer each line of `source` with a line of `target`, in the order of `source`.

    Args:
        model: MODEL for `serve`; used only if the gateway's URL is "".
        gateway: gateway of a running stack. If its URL is "", this command starts a stack.
        window: completion window of the batch, such as "24h".
        flags: further flags of `serve`.

    Returns:
        False if a line has an error instead of an answer.

    Raises:
        ConfigError: a file cannot be read or written, or both are the same.
        InvalidRequestError: the server refuses the input file, whose lines the message names, or another request.
        UnavailableError: the stack has ended or does not answer.
    """
    asked = AskedBatch(_read(source))
    if target.is_file() and target.samefile(source):
        raise ConfigError(f"the answers would replace their requests in {source}; give another output file")
    output = OutputFile(target)
    if not asked.bodies:
        output.write(asked.answered())  # no stack is needed
    elif gateway.url:
        _answer(Server(gateway), asked, output, source, window)
    else:
        with output.store() as store, _own_stack(model, store, flags) as url:
            _answer(Server(GatewayClient(url, gateway.api_key)), asked, output, source, window)
    return asked.is_good


class AskedBatch:
    """The lines of an input file, and their answers as they become known.

    Attributes:
        bodies: for each URL, the lines that may be in its batch, by line number from 1.
        is_good: whether no line has an error so far.
    """

    def __init__(self, content: bytes) -> None:
        self.bodies: dict[str, dict[int, Json]] = {}
        self.is_good = True
        self._ids: dict[int, Any] = {}
        """The `custom_id` of each line, in the order of the lines; None for a line that has none."""
        self._answers: dict[int, bytes] = {}
        for number, data in enumerate(content.splitlines(), 1):
            if data.strip():
                self._add(number, data)

    def answer(self, number: int, answer: bytes) -> None:
        """Set the answer of a line. Its `custom_id` is replaced by the one of the input."""
        told = {**json.loads(answer), "custom_id": self._ids[number]}
        self._answers[number] = json.dumps(told, separators=(",", ":")).encode()

    def refuse(self, number: int, code: str, message: str) -> None:
        """Set an error as the answer of a line."""
        self.is_good = False
        self.answer(number, error_line("", code, message).encode())

    def answered(self) -> list[bytes]:
        """Return the answers of all lines, in the order of the lines."""
        return [self._answers[number] for number in self._ids]

    def _add(self, number: int, data: bytes) -> None:
        self._ids[number] = None
        try:
            value = json.loads(data.decode("utf-8-sig"))
            self._ids[number] = value.get("custom_id")
        except (ValueError, RecursionError, AttributeError):
            value = {}
        numbered = {**value, "custom_id": str(number)} if value else value
        try:
            line = read_line(number, json.dumps(numbered).encode() if value else data, ENDPOINTS, sys.maxsize)
        except InvalidLineError as error:
            self.refuse(number, error.error.code, error.error.message)
        else:
            self.bodies.setdefault(line.url, {})[number] = numbered


class OutputFile:
    """The file of answers. Raises ConfigError if it cannot be written.

    A plain file, or the file to which a link leads, appears only when it is complete. A device or a pipe is written
    directly.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._file = target.resolve()
            self._status = target.stat() if target.exists() else None
            if target.is_dir():
                raise IsADirectoryError("it is a folder")
        except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
            raise ConfigError(f"cannot write {target}: {error}") from error

    @contextlib.contextmanager
    def store(self) -> Iterator[Path]:
        """Yield the path of the store of the command's own stack. It is removed unless there is an error."""
        if not self._is_plain:
            with tempfile.TemporaryDirectory(prefix="paceline-") as temporary:
                yield Path(temporary) / "store.db"
            return
        folder = self._file.with_name(f".{self._file.name}.paceline")
        try:
            make_private_folder(folder)
        except OSError as error:
            raise ConfigError(f"cannot write {self._target}: {error}") from error
        yield folder / "store.db"
        shutil.rmtree(folder, ignore_errors=True)

    def write(self, lines: Iterable[bytes]) -> None:
        """Write the answers, one line each, in place of the earlier content."""
        content = b"".join(line + b"\n" for line in lines)
        try:
            if self._is_plain:
                self._replace(content)
            else:
                with open(1, "wb", closefd=False) if self._is_stdout else self._target.open("wb") as file:
                    file.write(content)
        except OSError as error:
            raise ConfigError(f"cannot write {self._target}: {error}") from error

    @property
    def _is_plain(self) -> bool:
        return self._status is None or (stat.S_ISREG(self._status.st_mode) and not self._is_stdout)

    @property
    def _is_stdout(self) -> bool:
        """Whether the file is also the standard output of this command. Opening it again would overwrite output."""
        try:
            return self._status is not None and os.path.samestat(self._status, os.fstat(1))
        except OSError:
            return False

    def _replace(self, content: bytes) -> None:
        """Write the file anew. Only this user can read a file that did not exist."""
        handle, name = tempfile.mkstemp(prefix=f".{self._file.name}.", dir=self._file.parent)
        new = Path(name)
        try:
            with open(handle, "wb") as file:
                if self._status is not None:  # the mode of the beginning, because the file may be gone by now
                    new.chmod(stat.S_IMODE(self._status.st_mode))
                file.write(content)
            rename_durably(new, self._file)  # the server deletes its answers next
        except BaseException:
            new.unlink(missing_ok=True)
            raise


class Server:
    """A gateway. Questions are repeated while the gateway fails for a short time, for example because it restarts."""

    def __init__(self, gateway: GatewayClient) -> None:
        self.api_key = gateway.api_key
        self._gateway = gateway

    def ask(self, path: str, body: Json | None = None) -> Json:
        """Return the JSON object at a path. Raises InvalidRequestError or UnavailableError."""
        deadline = time.monotonic() + AWAY_SECONDS
        while True:
            try:
                return self._gateway.fetch(path, body, REQUEST_SECONDS)
            except UnavailableError:
                if body is not None or time.monotonic() > deadline:
                    raise
                time.sleep(POLL_SECONDS)

    def upload(self, name: str, content: bytes) -> str:
        """Upload an input file of a batch and return its id."""
        cut = uuid.uuid4().hex
        head = f'--{cut}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{cut}\r\n'
        head += f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        kind = {"Content-Type": f"multipart/form-data; boundary={cut}"}
        body = head.encode() + content + f"\r\n--{cut}--\r\n".encode()
        return str(json.loads(self._gateway.send("POST", "/v1/files", body, kind, REQUEST_SECONDS))["id"])

    def download(self, file_id: str) -> bytes:
        """Return the content of a file that the server has."""
        return self._gateway.send("GET", f"/v1/files/{file_id}/content", seconds=REQUEST_SECONDS)

    def delete(self, file_id: str) -> None:
        """Delete a file. A failure is no error, because files expire."""
        with contextlib.suppress(InvalidRequestError, UnavailableError):
            self._gateway.send("DELETE", f"/v1/files/{file_id}", seconds=REQUEST_SECONDS)


def _answer(server: Server, asked: AskedBatch, output: OutputFile, source: Path, window: str) -> None:
    """Answer all lines, by one batch for each URL, and write the answers."""
    read: list[str] = []
    for url, bodies in asked.bodies.items():
        left = dict(bodies)
        while left:
            batch = _run(server, url, left, source, window)
            read.append(batch["input_file_id"])
            if batch["status"] == "failed" and (refused := _refused(batch, left)):
                for number, code, message in refused:
                    asked.refuse(number, code, message)
                    del left[number]
                continue
            if batch["status"] not in ANSWERED:
                raise InvalidRequestError(_reason(batch, source))
            files = [file for file in (batch["output_file_id"], batch["error_file_id"]) if file]
            for line in (line for file in files for line in server.download(file).splitlines()):
                asked.answer(int(json.loads(line)["custom_id"]), line)
            asked.is_good &= batch["request_counts"]["failed"] == 0
            read += files
            break
    output.write(asked.answered())
    # Deleted last, so that a command that ends earlier finds all answers again.
    for file in read:
        server.delete(file)


def _run(server: Server, url: str, bodies: Mapping[int, Json], source: Path, window: str) -> Json:
    """Make a batch of some lines, wait for its end, and return it."""
    content = b"".join(json.dumps(body).encode() + b"\n" for body in bodies.values())
    digest = hmac.digest(server.api_key.encode(), content, "sha256").hex()
    batch = _find(server, digest)
    if batch is None:
        file_id = server.upload(source.name.replace('"', ""), content)
        body = {"input_file_id": file_id, "endpoint": url, "completion_window": window}
        batch = server.ask("/v1/batches", {**body, "metadata": {DIGEST: digest}})
    return _wait(server, batch)


def _refused(batch: Json, bodies: Mapping[int, Json]) -> list[tuple[int, str, str]]:
    """Return the number, code and message of each line that made a batch fail; [] if the whole file made it fail."""
    numbers, errors = list(bodies), (batch["errors"] or {"data": []})["data"]
    if not all(each["line"] for each in errors):
        return []
    return [(numbers[each["line"] - 1], each["code"], each["message"]) for each in errors]


def _find(server: Server, digest: str) -> Json | None:
    """Return the batch of an earlier run, unless it failed or its answers were fetched; None if there is none."""
    after = ""
    while True:
        page = server.ask(f"/v1/batches?limit=100{after}")
        for batch in page["data"]:
            if (batch["metadata"] or {}).get(DIGEST) == digest and _goes_on(server, batch):
                print(f"paceline: going on with {batch['id']}", file=sys.stderr)
                return dict(batch)
        if not page["has_more"]:
            return None
        after = f"&after={page['last_id']}"


def _goes_on(server: Server, batch: Json) -> bool:
    if batch["status"] not in ANSWERED:
        return batch["status"] not in (*ENDED, "cancelling")
    try:
        for file in (batch["output_file_id"], batch["error_file_id"]):
            if file:
                server.ask(f"/v1/files/{file}")
    except InvalidRequestError:
        return False
    return True


def _wait(server: Server, batch: Json) -> Json:
    """Show a batch's progress until it has ended, and return it."""
    is_live, shown = sys.stderr.isatty(), ""
    while True:
        counts = batch["request_counts"]
        done, failed = counts["completed"] + counts["failed"], counts["failed"]
        text = f"{batch['status']}: {done} of {counts['total']} lines" + (f", {failed} failed" if failed else "")
        if text != shown:
            print(f"\r\x1b[K{text}" if is_live else text, end="" if is_live else "\n", file=sys.stderr, flush=True)
            shown = text
        if batch["status"] in ENDED:
            if is_live:
                print(file=sys.stderr)
            return batch
        time.sleep(POLL_SECONDS)
        batch = server.ask(f"/v1/batches/{batch['id']}")


def _reason(batch: Json, source: Path) -> str:
    found = (batch["errors"] or {"data": []})["data"]
    lines = "; ".join(
        f"line {each['line']}: {each['message']}" if each["line"] else each["message"] for each in found[:5]
    )
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"the batch of {source} {batch['status']}" + (f": {lines}{more}" if lines else "")


def _read(source: Path) -> bytes:
    try:
        return source.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error}") from error


@contextlib.contextmanager
def _own_stack(model: str, store: Path, flags: Sequence[str]) -> Iterator[str]:
    """Start a stack, yield its URL when it serves, and stop it. Raises UnavailableError if it ends."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = child_command("serve", model, f"--port={port}", f"--store={store}", *flags)
    # SIGTERM becomes an exception, so that the stack is stopped. The stack has a group of its own, so that Ctrl-C ends
    # this command first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with subprocess.Popen(command, stdout=sys.stderr, process_group=0) as stack:
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + START_SECONDS
            while not _is_healthy(url):
                if stack.poll() is not None or time.monotonic() > deadline:
                    raise UnavailableError("the stack did not start; its messages are above")
                time.sleep(POLL_SECONDS)
            yield url
        finally:
            if stack.poll() is None:
                stack.send_signal(signal.SIGINT)
            stack.wait()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=REQUEST_SECONDS):
            return True
    except OSError:
        return False
