"""`paceline run-batch` against a running gateway."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.client import GatewayClient
from paceline.core.errors import ConfigError, UnavailableError
from paceline.run_batch import OutputFile, run_batch
from paceline.services.gateway.api.batches import routes
from tests.services.gateway.api.batches.conftest import StartBatches, line
from tests.services.gateway.conftest import Stack, eventually


class Command:
    """A command with its files."""

    def __init__(self, folder: Path, stack: Stack, lines: list[Any], url: str = "", key: str = "") -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.source.write_text("".join(json.dumps(each) + "\n" for each in lines))
        self._gateway = GatewayClient(url or stack.url, key)

    async def run(self) -> bool:
        return await asyncio.to_thread(run_batch, self.source, self.target, "", self._gateway, "24h", [])

    def answered(self) -> list[str]:
        return [json.loads(each)["custom_id"] for each in self.target.read_text().splitlines()]


async def test_each_line_gets_a_line_in_its_order(start_batches: StartBatches, tmp_path: Path) -> None:
    command = Command(tmp_path, await start_batches(), [line("b"), line("wrong", max_tokens=-1), line("a")])
    assert not await command.run()
    assert command.answered() == ["b", "wrong", "a"]


async def test_the_gateway_may_have_a_unix_socket(start_batches: StartBatches, tmp_path: Path) -> None:
    stack = await start_batches(uds=str(tmp_path / "socket"))
    command = Command(tmp_path, stack, [line("a")], f"unix:{tmp_path / 'socket'}")
    assert await command.run()
    assert command.answered() == ["a"]


async def test_a_command_that_runs_again_goes_on(start_batches: StartBatches, tmp_path: Path) -> None:
    stack = await start_batches(prefill=0, decode=0)
    command = Command(tmp_path, stack, [line("a"), line("b")])
    first = asyncio.create_task(command.run())

    async def has_begun() -> bool:
        return bool((await stack.http.get("/v1/batches")).json()["data"])

    await eventually(has_begun)
    second = asyncio.create_task(command.run())
    await stack.add("decode", "d")
    await asyncio.gather(first, second, return_exceptions=True)
    assert command.answered() == ["a", "b"]
    assert len((await stack.http.get("/v1/batches")).json()["data"]) == 1


BAD: list[Any] = [
    "no object",
    {},
    line("url", url="/v1/images/generations"),
    line("stream", stream=True),
    {**line("method"), "method": "GET"},
    {**line("body"), "body": "text"},
    line("long", prompt="x" * 5000),
]
"""Lines that no batch can have."""


async def test_a_line_that_is_wrong_is_no_fault_of_the_others(start_batches: StartBatches, tmp_path: Path) -> None:
    without_id = {name: value for name, value in line("x").items() if name != "custom_id"}
    lines = [line("a"), *BAD, line("a"), without_id, line("chat", url="/v1/completions"), line("wrong", max_tokens=-1)]
    scored = line("scored", url="/score", queries="x", documents=["y", "n"])
    reranked = line("reranked", url="/v2/rerank", query="x", documents=["y", "n"])
    stack = await start_batches(max_body_bytes=4000, score_tokens="y, n")
    command = Command(tmp_path, stack, [*lines, scored, reranked])
    assert not await command.run()
    answers = [json.loads(each) for each in command.target.read_text().splitlines()]
    ids = ["a", None, None, "url", "stream", "method", "body", "long", "a", None, "chat", "wrong", "scored", "reranked"]
    assert [answer["custom_id"] for answer in answers] == ids
    codes = [answer["error"]["code"] for answer in answers[1:8]]
    assert codes[2:] == [
        "invalid_url",
        "invalid_request",
        "invalid_method",
        "missing_required_parameter",
        "line_too_long",
    ]
    answered = [answers[0], *answers[8:11], *answers[12:]]
    assert [answer["response"]["status_code"] for answer in answered] == [200] * 6
    assert answers[11]["response"]["status_code"] == 400


@pytest.mark.parametrize(("content", "is_good"), [("", True), ("\n \n", True), ("no JSON\n", False)])
async def test_no_stack_starts_for_nothing(tmp_path: Path, content: str, is_good: bool) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "new" / "out.jsonl"
    source.write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("subprocess.Popen", None)
        assert run_batch(source, target, "no model", GatewayClient("", ""), "24h", []) == is_good
    assert len(target.read_text().splitlines()) == (not is_good)


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "out.jsonl", tmp_path / "link"
    link.symlink_to(real)
    for lines in ([b"a"], [b"b", b"c"]):
        OutputFile(link).write(lines)
        assert link.is_symlink()
        assert real.read_bytes().splitlines() == lines
        real.chmod(0o600)
    assert real.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["link", "out.jsonl", "real"]


def test_answers_are_on_the_disk_before_the_server_deletes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, synced = os.fsync, list[tuple[Path, bytes]]()
    target = tmp_path / "out.jsonl"

    def sync(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), target.read_bytes()))
        fsync(descriptor)

    target.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", sync)
    OutputFile(target).write([b"new"])
    (new, before), (folder, after) = synced
    assert (new.parent, folder) == (tmp_path, tmp_path)
    assert (before, after) == (b"old", b"new\n")


def test_only_its_owner_reads_a_new_output(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    OutputFile(target).write([b"secret"])
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    target.chmod(0o644)  # who has made the file decides
    OutputFile(target).write([b"more"])
    assert (stat.S_IMODE(target.stat().st_mode), target.read_bytes()) == (0o644, b"more\n")
    output = OutputFile(target)
    target.unlink()  # while the batch runs
    output.write([b"again"])
    assert (stat.S_IMODE(target.stat().st_mode), target.read_bytes()) == (0o644, b"again\n")
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("trap", ["link", "open folder", "file"])
def test_what_another_user_has_put_beside_the_output_is_not_used(tmp_path: Path, trap: str) -> None:
    beside, other = tmp_path / ".out.jsonl.paceline", tmp_path / "other"
    other.mkdir(mode=0o700)
    match trap:
        case "link":
            beside.symlink_to(other)
        case "open folder":
            beside.mkdir()
            beside.chmod(0o777)
        case _:
            beside.touch()
    with (
        pytest.raises(ConfigError, match="remove it, or give another output"),
        OutputFile(tmp_path / "out.jsonl").store(),
    ):
        pass
    assert not list(other.iterdir())


def test_the_store_beside_the_output_is_private_and_stays_until_the_answers_are_written(tmp_path: Path) -> None:
    output = OutputFile(tmp_path / "out.jsonl")
    kept = tmp_path / ".out.jsonl.paceline" / "store.db"

    def fail() -> None:
        with output.store() as store:
            store.touch()
            raise UnavailableError("ended")

    with pytest.raises(UnavailableError):
        fail()
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    with output.store() as again:
        assert (again, again.exists()) == (kept, True)
    assert not list(tmp_path.iterdir())


def test_pipes_are_written_to_as_devices_are(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with open(os.open(pipe, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as reader:
        for target in (pipe, link):
            OutputFile(target).write([b"a", b"b"])
            assert reader.read(100) == b"a\nb\n"
    assert (pipe.is_fifo(), link.is_symlink()) == (True, True)


@pytest.mark.parametrize("how", ["pipe", "file", "appended"])
def test_standard_output_goes_on_after_what_is_there(tmp_path: Path, how: str) -> None:
    program = (
        "from pathlib import Path; from paceline.run_batch import OutputFile; import sys;"
        "print('before', flush=True); OutputFile(Path('/dev/stdout')).write([b'line']); print('after')"
    )
    target = tmp_path / "out"
    target.write_text("older\n" if how == "appended" else "")
    with target.open("ab" if how == "appended" else "wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE if how == "pipe" else file, check=True, text=True
        )
    told = done.stdout if how == "pipe" else target.read_text()
    assert told.split() == [*(["older"] if how == "appended" else []), "before", "line", "after"]
    assert list(tmp_path.iterdir()) == [target]


def test_an_output_that_cannot_be_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    for target in (tmp_path, tmp_path / "loop", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot write"):
            OutputFile(target)


@pytest.mark.parametrize("how", ["same", "symbolic", "hard"])
def test_answers_do_not_replace_their_requests(tmp_path: Path, how: str) -> None:
    source = target = tmp_path / "in.jsonl"
    source.write_text("no request\n")
    if how != "same":
        target = tmp_path / "out.jsonl"
        (target.symlink_to if how == "symbolic" else target.hardlink_to)(source)
    with pytest.raises(ConfigError, match="replace their requests"):
        run_batch(source, target, "", GatewayClient("", ""), "24h", [])
    assert source.read_text() == "no request\n"


def test_a_dash_is_standard_input_or_output() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run-batch", "-i", "-", "-o", "-"],
        input="no request\n",
        capture_output=True,
        text=True,
    )
    assert (json.loads(done.stdout)["error"]["code"], done.returncode) == ("invalid_json_line", 1)


async def test_lines_that_were_answered_in_time_are_written(
    start_batches: StartBatches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "window_seconds", lambda window: 1)
    stack = await start_batches()
    stack.pause_decode(after=2)
    command = Command(tmp_path, stack, [line("long", max_tokens=20), line("short", max_tokens=1)])
    assert not await command.run()
    long, short = (json.loads(each) for each in command.target.read_text().splitlines())
    assert (long["error"]["code"], short["response"]["status_code"]) == ("batch_expired", 200)


async def test_an_admin_does_not_take_over_the_batch_of_another_key(
    start_batches: StartBatches, tmp_path: Path
) -> None:
    stack = await start_batches(prefill=0, decode=0, api_key="client", admin_key="admin")

    async def count() -> int:
        return len((await stack.http.get("/v1/batches", headers={"authorization": "Bearer admin"})).json()["data"])

    async def begin(key: str, batches: int) -> asyncio.Task[bool]:
        (tmp_path / key).mkdir()
        command = asyncio.create_task(Command(tmp_path / key, stack, [line("a")], key=key).run())

        async def has_begun() -> bool:
            return await count() == batches

        await eventually(has_begun)
        return command

    running = [await begin("client", 1), await begin("admin", 2)]
    await stack.add("decode", "d")
    assert await asyncio.gather(*running) == [True, True]
