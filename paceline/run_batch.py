"""`paceline run-batch`: answer the requests of a file, on a stack of its own or on a running one.

The work is that of `/v1/files` and `/v1/batches`, so this command only uploads, waits and downloads. The batch has a
digest of its input in its metadata. A command that was ended and runs again finds the batch by it and goes on. The
digest is made with the API key, because an admin sees the batches of all keys.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.client import GatewayClient
from paceline.core.errors import ConfigError, InvalidRequestError, UnavailableError

POLL_SECONDS = 0.5
START_SECONDS = 86400.0
"""Longest time until a stack of the command's own serves. It may have to download the model."""
REQUEST_SECONDS = 120.0
AWAY_SECONDS = 60.0
"""A gateway that has not answered for this long is given up. The command can be run again."""
DIGEST = "paceline_input"
"""Key of the metadata with the digest of the input."""
ANSWERED = ("completed", "expired")
"""States of a batch that has a line for each line of its input. After it has expired, some of them are errors."""
ENDED = (*ANSWERED, "failed", "cancelled")

Json = dict[str, Any]


def run_batch(
    source: Path, target: Path, model: str, gateway: GatewayClient, window: str, flags: Sequence[str]
) -> bool:
    """Answer each line of `source` with a line of `target`, in the order of `source`.

    Args:
        model: what `serve` takes as MODEL; used if the gateway has no URL.
        gateway: gateway of a running stack. If its URL is "", this command starts a stack.
        window: completion window of the batch, such as "24h".
        flags: further flags of `serve`.

    Returns:
        False if a line has an error instead of an answer.

    Raises:
        ConfigError: a file cannot be read or written.
        InvalidRequestError: the input file, or something else, is refused. The message names its lines.
        UnavailableError: the stack has ended or does not answer.
    """
    content = _read(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    if gateway.url:
        return _run(Server(gateway), content, source, target, window)
    store = target.with_name(f".{target.name}.store.db")
    with _own_stack(model, store, flags) as url:
        is_good = _run(Server(GatewayClient(url, gateway.api_key)), content, source, target, window)
    for suffix in ("", "-wal", "-shm"):
        store.with_name(store.name + suffix).unlink(missing_ok=True)
    return is_good


class Server:
    """A gateway. Short failures, such as its restart, are waited for."""

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
        """Upload an input file and return its id."""
        cut = uuid.uuid4().hex
        head = f'--{cut}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{cut}\r\n'
        head += f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        kind = {"Content-Type": f"multipart/form-data; boundary={cut}"}
        body = head.encode() + content + f"\r\n--{cut}--\r\n".encode()
        return str(json.loads(self._gateway.send("POST", "/v1/files", body, kind, REQUEST_SECONDS))["id"])

    def download(self, file_id: str) -> bytes:
        """Return the content of a file."""
        return self._gateway.send("GET", f"/v1/files/{file_id}/content", seconds=REQUEST_SECONDS)

    def delete(self, file_id: str) -> None:
        """Delete a file. A failure is no error, because files expire."""
        with contextlib.suppress(InvalidRequestError, UnavailableError):
            self._gateway.send("DELETE", f"/v1/files/{file_id}", seconds=REQUEST_SECONDS)


def _run(server: Server, content: bytes, source: Path, target: Path, window: str) -> bool:
    digest = hmac.digest(server.api_key.encode(), content, "sha256").hex()
    batch = _find(server, digest)
    if batch is None:
        file_id = server.upload(source.name.replace('"', ""), content)
        body = {"input_file_id": file_id, "endpoint": _endpoint(content), "completion_window": window}
        batch = server.ask("/v1/batches", {**body, "metadata": {DIGEST: digest}})
    batch = _wait(server, batch)
    if batch["status"] not in ANSWERED:
        raise InvalidRequestError(_reason(batch, source))
    files = [file for file in (batch["output_file_id"], batch["error_file_id"]) if file]
    answers = {json.loads(line)["custom_id"]: line for file in files for line in server.download(file).splitlines()}
    _write(target, [answers[json.loads(line)["custom_id"]] for line in content.splitlines() if line.strip()])
    for file in (*files, batch["input_file_id"]):
        server.delete(file)
    return bool(batch["request_counts"]["failed"] == 0)


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


def _endpoint(content: bytes) -> str:
    """Return the URL of the first line, which all lines must have. The server says what is wrong with it."""
    first = next((line for line in content.splitlines() if line.strip()), b"")
    try:
        return str(json.loads(first)["url"])
    except (ValueError, LookupError, TypeError):
        raise InvalidRequestError("line 1 of the input file is not a JSON object with a url") from None


def _read(source: Path) -> bytes:
    try:
        return source.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error}") from error


def _write(target: Path, lines: Sequence[bytes]) -> None:
    """Write a file that is there as a whole or not at all."""
    new = target.with_name(f".{target.name}.new")
    try:
        with new.open("wb") as file:
            file.writelines(line + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        new.replace(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error}") from error


@contextlib.contextmanager
def _own_stack(model: str, store: Path, flags: Sequence[str]) -> Iterator[str]:
    """Start a stack, yield its URL when it serves, and stop it. Raises UnavailableError if it ends."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "paceline", "serve", model, f"--port={port}", f"--store={store}", *flags]
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
