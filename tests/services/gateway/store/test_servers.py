"""PostgreSQL and MariaDB as the store: the tests of SQLite's store and some more, on real servers.

A server is started if its program is installed (Debian: postgresql, mariadb-server), in a temporary folder and without
a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.services.gateway.api.batches.batch_store import BatchStore
from paceline.services.gateway.api.responses.store import ResponseStore
from paceline.services.gateway.store import database
from paceline.services.gateway.store.database import DRIVER_OPTIONS, StoreError, open_database
from paceline.services.gateway.store.store import Store
from tests.services.gateway.api.batches import test_batch_store, test_routes
from tests.services.gateway.api.batches.conftest import content, ended, line, submit
from tests.services.gateway.api.batches.test_batch_store import LATER, allowed, batch
from tests.services.gateway.api.responses import test_store
from tests.services.gateway.conftest import StartStack

START_SECONDS = 60.0
PLACES = ":".join(["/usr/sbin", *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))])
TABLES = ("files", "file_chunks", "batches", "batch_lines", "responses")
# The servers refuse to run as root.
USER: dict[str, Any] = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}


def program(name: str) -> str:
    """Return the path of a server's program. Skips the test if there is none."""
    found = shutil.which(name) or shutil.which(name, path=PLACES)
    if found is None:
        pytest.skip(f"NOT TESTED: {name} is not installed (Debian: postgresql, mariadb-server)")
    return found


@contextlib.contextmanager
def serving(make: list[str], serve: list[str], socket: Path, url: str) -> Iterator[str]:
    """Make the files of a database server and run it. Yield its URL when it answers."""
    folder = socket.parent
    with (folder / "log").open("wb") as log:
        options: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": folder, **USER}
        subprocess.run(make, check=True, timeout=START_SECONDS, **options)
        with subprocess.Popen(serve, **options) as server:
            try:
                deadline = time.monotonic() + START_SECONDS
                # Not before there is a socket: pymysql does not close what it cannot connect.
                while not (socket.exists() and answers(url)):
                    assert server.poll() is None, (folder / "log").read_text()
                    assert time.monotonic() < deadline, (folder / "log").read_text()
                    time.sleep(0.1)
                yield url
            finally:
                server.terminate()


def answers(url: str) -> bool:
    database = open_database(url)
    try:
        with database.transaction() as execute:
            return execute("SELECT 1")[0] == [(1,)]
    except StoreError:
        return False
    finally:
        database.close()


@pytest.fixture(scope="module", params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a server."""
    # The path of a Unix socket has at most 107 bytes, so the folder's path must be short.
    with tempfile.TemporaryDirectory(prefix="paceline-sql-") as name:
        folder, data = Path(name), f"{name}/data"
        if USER:
            shutil.chown(folder, USER["user"], USER["group"])
        if request.param == "postgresql":
            pytest.importorskip("psycopg", reason="NOT TESTED: the package psycopg is not installed")
            make = [program("initdb"), "-D", data, "-U", "paceline", "--auth=trust", "--no-sync", "--encoding=UTF8"]
            serve = [program("postgres"), "-D", data, "-k", name, "-c", "listen_addresses=", "-F"]
            url, socket = f"postgresql+psycopg://paceline@/postgres?host={name}", ".s.PGSQL.5432"
        else:
            pytest.importorskip("pymysql", reason="NOT TESTED: the package pymysql is not installed")
            install = program("mariadb-install-db")
            make = [install, "--no-defaults", f"--datadir={data}", "--auth-root-authentication-method=normal"]
            serve = [program("mariadbd"), "--no-defaults", f"--datadir={data}", f"--socket={name}/socket"]
            serve += [f"--pid-file={name}/pid", "--skip-networking", "--innodb-flush-log-at-trx-commit=0"]
            url, socket = f"mariadb+pymysql://root@localhost/test?unix_socket={name}/socket", "socket"
        with serving(make, serve, folder / socket, url):
            yield url


@pytest.fixture
def url(server: str) -> str:
    """URL of a database without tables."""
    database = open_database(server)
    for name in TABLES:
        with database.transaction() as execute:
            execute(f"DROP TABLE IF EXISTS paceline_{name}")
    database.close()
    return server


@pytest.fixture
def open_shared(url: str) -> Iterator[Callable[[], Store]]:
    """Return a function that opens the store of another gateway."""
    with contextlib.ExitStack() as stack:

        def open_() -> Store:
            shared = Store(open_database(url))
            stack.callback(shared.close)
            return shared

        yield open_


def each_test_of(module: Any) -> Any:
    """Return the tests of a module that need nothing but a function that opens a store."""
    found = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    chosen = {name: test for name, test in found.items() if list(inspect.signature(test).parameters) == ["open_store"]}
    return pytest.mark.parametrize("test", chosen.values(), ids=chosen.keys())


Check = Callable[[Any], Awaitable[None]]


@each_test_of(test_batch_store)
async def test_batches(test: Check, open_shared: Callable[[], Store]) -> None:
    await test(lambda: BatchStore(open_shared(), most=3, seconds=100.0))


@each_test_of(test_store)
async def test_responses(test: Check, open_shared: Callable[[], Store]) -> None:
    def open_store(entries: int = 10, max_bytes: int = 10_000, seconds: float = 100.0) -> ResponseStore:
        return ResponseStore(open_shared(), entries=entries, max_bytes=max_bytes, seconds=seconds)

    await test(open_store)


async def test_gateways_that_begin_at_once_share_all_batches(open_shared: Callable[[], Store]) -> None:
    gateways = {name: BatchStore(open_shared(), most=100, seconds=100.0) for name in "abcd"}
    names = {f"{owner}{number}" for owner in "xyz" for number in range(8)}
    turns = zip(names, 6 * list(gateways.values()), strict=True)
    await asyncio.gather(*(gateway.add(batch(name, owner=name[0]), allowed) for name, gateway in turns))

    async def take(name: str, gateway: BatchStore) -> list[str]:
        taken: list[str] = []
        for _ in range(8):
            claimed = await gateway.claim(name, LATER, 2, 100, taken)
            taken += [each.id for each in claimed]
            assert set(await gateway.renew(name, LATER, taken)) == set(taken)
            for each in claimed:
                await gateway.change(each.id, lambda state: state.moved("in_progress", 1.0, total=1), name)
        return taken

    taken = await asyncio.gather(*(take(name, gateway) for name, gateway in gateways.items()))
    assert sorted(each for own in taken for each in own) == sorted(names)


def test_a_statement_that_takes_too_long_is_given_up(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "ANSWER_SECONDS", 1)
    monkeypatch.setitem(cast(dict[str, int], DRIVER_OPTIONS["pymysql"]), "read_timeout", 1)
    with (
        contextlib.closing(open_database(server)) as opened,
        pytest.raises(StoreError),
        opened.transaction() as execute,
    ):
        execute("SELECT pg_sleep(30)" if server.startswith("postgresql") else "SELECT SLEEP(30)")


async def test_a_gateway_keeps_its_files_batches_and_responses_there(start_stack: StartStack, url: str) -> None:
    stack = await start_stack(store=url)
    await test_routes.test_a_file_is_kept_as_it_came(stack)
    await test_routes.test_files_are_listed_in_pages(stack)
    made = await submit(stack, [line("a"), line("é"), line("wrong", max_tokens=-1)])
    done = await ended(stack, made.id)
    assert (done.status, done.request_counts.completed) == ("completed", 2)  # type: ignore[union-attr]
    assert set(await content(stack, done.output_file_id)) == {"a", "é"}
    assert set(await content(stack, done.error_file_id)) == {"wrong"}
    options: dict[str, Any] = {"model": "toy", "max_output_tokens": 4}
    response = await stack.openai.responses.create(input="x", **options)
    again = await stack.openai.responses.create(input="y", previous_response_id=response.id, **options)
    assert (await stack.openai.responses.retrieve(again.id)).previous_response_id == response.id
    for path in ("/v1/files/a%00b", "/v1/batches?after=%00", "/v1/responses/%00"):
        assert (await stack.http.get(path)).status_code == 400
