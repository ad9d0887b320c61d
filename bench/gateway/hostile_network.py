"""A network of its own with a hostile web server at a public address, a name server that lies, and private servers.

`enter` starts the current program again in a network namespace in which nothing but this machine can be reached. So
the gateway runs with its default options, and its guard sees public and private addresses as on the internet.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from bench.gateway.hostile_media import DEAD, READABLE, REFUSED, REFUSED_OR_DEAD
from tests.services.gateway.planning.media.hostile_server import (
    BROKEN,
    SLOW,
    TOO_MUCH,
    Handler,
    answer,
    redirect,
    response,
    serve,
)
from tests.services.gateway.planning.media.samples import image_file

PUBLIC = "9.9.9.9"
"""The address of the hostile web server; in its namespace, no other machine has it."""
PRIVATE = ("10.0.0.1", "169.254.169.254")
NAME_SERVER = "127.0.0.53"
_INSIDE = "PACELINE_BENCH_HOSTILE_NETWORK"
_WEB_PORTS = (80, 443, 8080)
_CLOSED_PORT = 8443

_NAMES: Mapping[str, tuple[str, ...]] = {
    "media.test": (PUBLIC,),
    "secret.test": ("10.0.0.1",),
    "mixed.test": ("127.0.0.1", PUBLIC, "10.0.0.1"),
}
"""Names with honest answers. `rebind.test` has another address each time, and `silent.test` has no answer."""


class NoNetworkError(RuntimeError):
    """The network cannot be made on this machine; the message says why."""


def enter() -> None:
    """Run this program in the namespace. Outside of it, start it there, and end when it ends.

    Raises NoNetworkError if there can be no namespace.
    """
    if os.environ.get(_INSIDE):
        _prepare()
        return
    missing = [tool for tool in ("unshare", "ip") if shutil.which(tool) is None]
    if missing:
        raise NoNetworkError(f"{missing[0]} is missing; install util-linux and iproute2")
    as_root = () if os.geteuid() == 0 else ("--map-root-user",)
    command = ["unshare", "--net", "--mount", *as_root, sys.executable, *_own_arguments()]
    raise SystemExit(subprocess.run(command, env={**os.environ, _INSIDE: "1"}).returncode)


def _own_arguments() -> list[str]:
    """Return the arguments after the name of Python in the command of this program, which runs as a module."""
    return sys.orig_argv[1:]


def _prepare() -> None:
    commands = [["ip", "link", "set", "lo", "up"]]
    commands += [["ip", "address", "add", f"{address}/32", "dev", "lo"] for address in (PUBLIC, *PRIVATE)]
    with tempfile.NamedTemporaryFile("w", suffix=".conf", delete=False) as file:
        file.write(f"nameserver {NAME_SERVER}\n")
    Path(file.name).chmod(0o644)
    commands.append(["mount", "--bind", file.name, "/etc/resolv.conf"])
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise NoNetworkError(f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}") from None
    finally:
        os.unlink(file.name)


_REDIRECTS = (
    "http://127.0.0.1/",
    "http://10.0.0.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::1]/",
    "http://[::ffff:10.0.0.1]/",
    "//10.0.0.1/",
    "http://secret.test/",
    "http://mapped.test/",
    "http://0x7f.1/",
    "file:///etc/passwd",
    "gopher://media.test/",
)


def _paths() -> dict[str, tuple[Handler, frozenset[int]]]:
    """Return the web server's behaviour at each path, and the answers of the gateway that are right for it."""
    several = (("broken", BROKEN, DEAD), ("slow", SLOW, DEAD), ("large", TOO_MUCH, REFUSED_OR_DEAD))
    paths = {
        f"/{group}/{name.replace(' ', '-')}": (do, right) for group, all, right in several for name, do in all.items()
    }
    paths |= {f"/redirect/{number}": (redirect(to), REFUSED) for number, to in enumerate(_REDIRECTS)}
    return paths | {
        "/": (redirect("/"), DEAD),
        "/rebind": (redirect("http://rebind.test/rebind"), REFUSED_OR_DEAD),
        "/page": (answer(response(b"<!doctype html>", Content_Type="image/png")), REFUSED),
        "/image": (answer(response(image_file())), READABLE),
        "/missing": (answer(response(b"", "404 Not Found")), DEAD),
    }


PATHS = _paths()
URLS: Mapping[str, frozenset[int]] = {
    **{f"http://media.test{path}": right for path, (_, right) in PATHS.items()},
    "http://rebind.test/rebind": REFUSED_OR_DEAD,
    "http://mixed.test/missing": DEAD,
    "http://silent.test/": DEAD,
    "http://unknown.test/": DEAD,
    f"http://media.test:{_CLOSED_PORT}/": DEAD,
    "https://media.test/": DEAD,
}
"""URLs of the hostile servers, and the answers of the gateway that are right."""


class NameServer(asyncio.DatagramProtocol):
    """Answers questions for addresses, by UDP."""

    def __init__(self) -> None:
        self._turns = itertools.cycle((PUBLIC, "127.0.0.1", "10.0.0.1"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, source: tuple[str, int]) -> None:
        name, end = _name(data)
        (kind,) = struct.unpack_from(">H", data, end)
        if name == "silent.test":
            return
        found = self._addresses(name, kind)
        head = data[:2] + struct.pack(">HHHHH", 0x8180 if found is not None else 0x8183, 1, len(found or ()), 0, 0)
        records = (struct.pack(">HHHIH", 0xC00C, kind, 1, 0, len(each)) + each for each in found or ())
        self._transport.sendto(head + data[12 : end + 4] + b"".join(records), source)  # type: ignore[attr-defined]

    def _addresses(self, name: str, kind: int) -> list[bytes] | None:
        """Return the packed addresses of a name of type A (1) or AAAA (28); None if there is no such name."""
        if name == "mapped.test":
            return [socket.inet_pton(socket.AF_INET6, "::ffff:127.0.0.1")] if kind == 28 else []
        if name == "rebind.test":
            addresses: Sequence[str] = (next(self._turns),) if kind == 1 else ()
        elif name in _NAMES:
            addresses = _NAMES[name] if kind == 1 else ()
        else:
            return None
        return [socket.inet_aton(address) for address in addresses]


def _name(data: bytes) -> tuple[str, int]:
    """Return the name in a question, and the place behind it."""
    labels, at = [], 12
    while length := data[at]:
        labels.append(data[at + 1 : at + 1 + length].decode("latin-1").lower())
        at += 1 + length
    return ".".join(labels), at + 1


@contextlib.asynccontextmanager
async def servers() -> AsyncIterator[Counter[str]]:
    """Run all servers. Yield the number of connections to each private server; any connection is a fault."""
    found: Counter[str] = Counter()

    async def private(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found[writer.get_extra_info("sockname")[0]] += 1
        writer.close()

    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        transport, _ = await loop.create_datagram_endpoint(NameServer, local_addr=(NAME_SERVER, 53))
        stack.callback(transport.close)
        for port in _WEB_PORTS:
            await stack.enter_async_context(
                serve({path: handler for path, (handler, _) in PATHS.items()}, host=PUBLIC, port=port)
            )
        for address in ("127.0.0.1", "::1", *PRIVATE):
            server = await asyncio.start_server(private, address, 80)
            stack.callback(server.close)
        yield found
