"""Files that others delete, read or write at the same moment, on SQLite's own module and on SQLAlchemy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from paceline.services.gateway.api.batches.batch_store import BatchStore, InUseError, inputs
from paceline.services.gateway.api.batches.file_store import (
    CHUNK_BYTES,
    File,
    FileStore,
    MissingFileError,
    OtherFileError,
    QuotaError,
)
from paceline.services.gateway.store.database import open_database
from paceline.services.gateway.store.store import Store
from tests.services.gateway.api.batches.test_batch_store import LATER, batch

PAST = 1.0


class Gateway(NamedTuple):
    files: FileStore
    batches: BatchStore

    async def upload(self, name: str, *chunks: bytes, as_id: str = "", expires: float = LATER) -> File:
        file = File(name, "me", "batch", "in.jsonl", 0, 0.0, expires)
        await self.files.begin(file)
        for number, data in enumerate(chunks):
            await self.files.append(file, number, data)
        return await self.files.finish(file, as_id=as_id)

    async def read(self, name: str) -> bytes:
        return b"".join([data async for data in self.files.content(name)])


@pytest.fixture(params=["", "sqlite:///"])
def open_gateway(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Gateway]]:
    if request.param:
        pytest.importorskip("sqlalchemy")
    with contextlib.ExitStack() as stack:

        def open_() -> Gateway:
            store = stack.enter_context(contextlib.closing(Store(open_database(f"{request.param}{tmp_path / 'db'}"))))
            return Gateway(FileStore(store, entries=3, max_bytes=10**6), BatchStore(store, most=9, seconds=100.0))

        yield open_


async def test_a_file_that_an_active_batch_reads_is_not_deleted(open_gateway: Callable[[], Gateway]) -> None:
    gateway = open_gateway()
    await gateway.upload("f", b"line\n")
    await gateway.batches.add(batch("a"), gateway.files.hold("f", LATER))
    with pytest.raises(InUseError, match="'a' still reads this file"):
        await gateway.files.delete("f", gateway.batches.unused("f"))
    assert await gateway.read("f") == b"line\n"
    await gateway.batches.change("a", lambda state: state.moved("failed", 1.0))
    await gateway.files.delete("f", gateway.batches.unused("f"))
    assert await gateway.read("f") == b""


async def test_a_batch_of_a_file_that_was_deleted_is_not_added(open_gateway: Callable[[], Gateway]) -> None:
    gateway = open_gateway()
    await gateway.upload("f", b"line\n")
    hold = gateway.files.hold("f", LATER)
    await gateway.files.delete("f", gateway.batches.unused("f"))
    with pytest.raises(MissingFileError):
        await gateway.batches.add(batch("a"), hold)
    assert await gateway.batches.get("a", "me") is None
    with pytest.raises(MissingFileError):
        await gateway.files.delete("f", gateway.batches.unused("f"))


async def test_the_input_of_an_active_batch_does_not_expire(open_gateway: Callable[[], Gateway]) -> None:
    """The gateways may all have been away for longer than the batch had."""
    gateway = open_gateway()
    for name in ("f", "other"):
        await gateway.upload(name, b"line\n")
    await gateway.batches.add(batch("a"), gateway.files.hold("f", LATER))
    for name in ("f", "other"):
        file = File(name, "me", "batch", "in.jsonl", 0, 0.0, PAST)
        await gateway.files.begin(file)
        await gateway.files.append(file, 0, b"line\n")
        await gateway.files.finish(file)
    await gateway.files.delete_expired(inputs)
    assert [await gateway.read(name) for name in ("f", "other")] == [b"line\n", b""]


async def test_what_is_added_to_a_file_that_is_gone_is_an_error(open_gateway: Callable[[], Gateway]) -> None:
    gateway = open_gateway()
    file = File("f", "me", "batch", "in.jsonl", 0, 0.0, LATER)
    await gateway.files.begin(file)
    await gateway.files.append(file, 0, b"line\n")
    await gateway.files.discard("f")
    with pytest.raises(MissingFileError):
        await gateway.files.append(file, 1, b"line\n")
    with pytest.raises(MissingFileError):
        await gateway.files.finish(file)
    assert await gateway.read("f") == b""


async def test_an_upload_that_comes_again_is_the_same_file(open_gateway: Callable[[], Gateway]) -> None:
    one, other = open_gateway(), open_gateway()
    content = [b"x" * CHUNK_BYTES, b"y"]
    made = await one.upload("try-1", *content, as_id="f")
    assert made.id == "f"
    assert await other.upload("try-2", *content, as_id="f") == replace(made, created=0.0)
    assert [file.id for file in await one.files.page("me", "", None, 9, "asc")] == ["f"]
    for different in ([b"x" * CHUNK_BYTES, b"z"], [b"x" * CHUNK_BYTES], [b"x" * CHUNK_BYTES, b"yy"]):
        with pytest.raises(OtherFileError):
            await other.upload("try-3", *different, as_id="f")
        await other.files.discard("try-3")
    assert await one.read("f") == b"".join(content)


async def test_an_upload_in_chunks_of_any_size_comes_again(open_gateway: Callable[[], Gateway]) -> None:
    gateway = open_gateway()
    content = [b"x", b"yy", b"z"]  # message batches do not cut lines, so their chunks have many sizes
    made = await gateway.upload("try-1", *content, as_id="f")
    assert await gateway.upload("try-2", *content, as_id="f") == replace(made, created=0.0)
    with pytest.raises(OtherFileError):
        await gateway.upload("try-3", *content[:2], b"a", as_id="f")


async def test_two_tries_at_the_same_time_do_not_mix(open_gateway: Callable[[], Gateway]) -> None:
    gateway = open_gateway()
    tries = [File(name, "me", "batch", "in.jsonl", 0, 0.0, LATER) for name in ("try-1", "try-2")]
    for number, data in enumerate([b"x" * CHUNK_BYTES, b"y"]):
        for file in tries:
            if number == 0:
                await gateway.files.begin(file)
            await gateway.files.append(file, number, data)
    made = [await gateway.files.finish(file, as_id="f") for file in tries]
    assert made[0] == made[1]
    assert await gateway.read("f") == b"x" * CHUNK_BYTES + b"y"
    assert await gateway.read("try-2") == b""


async def test_the_quota_holds_for_uploads_and_not_for_answers(open_gateway: Callable[[], Gateway]) -> None:
    gateway = open_gateway()
    for name in "abc":
        await gateway.upload(name, b"x")
    with pytest.raises(QuotaError, match="--stored-files"):
        await gateway.upload("d", b"x")
    answers = File("answers", "me", "batch_output", "out.jsonl", 0, 0.0, LATER)
    await gateway.files.begin(answers, lambda execute: None)
    await gateway.files.append(answers, 0, b"x" * 10**6, lambda execute: None)
    assert (await gateway.files.finish(answers, lambda execute: None)).size == 10**6
