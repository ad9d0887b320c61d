import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from bench.common.workloads import Request, Workload
from bench.serving.load import Outcome, Server, ServerError, Stream, percentile, summarize, table, understand

REQUEST = Request(prompt=(5, 6, 7), max_tokens=3)


def chunk(text: str = "", finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def sse(*events: dict[str, object]) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


USAGE: dict[str, object] = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}
DONE = b"data: [DONE]\n\n"


def outcome(*pieces: tuple[float, bytes]) -> Outcome:
    return understand(Stream(REQUEST, sent=1.0, ended=9.0, pieces=list(pieces)))


class TestUnderstand:
    def test_stamps_each_chunk_with_its_arrival(self) -> None:
        got = outcome((2.0, sse(chunk("a"))), (3.0, sse(chunk("b"))), (4.0, sse(chunk("c", "length"), USAGE) + DONE))
        assert got == Outcome("all", 1.0, 9.0, (2.0, 3.0, 4.0), 3, 3)

    def test_an_event_that_comes_in_pieces_counts_when_it_is_whole(self) -> None:
        whole = sse(chunk("abc"))
        got = outcome((2.0, whole[:10]), (3.0, whole[10:] + sse(USAGE) + DONE))
        assert got.chunks == (3.0,)

    def test_a_chunk_that_only_finishes_is_no_token_but_a_withheld_character_is(self) -> None:
        got = outcome((2.0, sse(chunk("a"))), (3.0, sse(chunk(""))), (4.0, sse(chunk("", "length"), USAGE) + DONE))
        assert got.chunks == (2.0, 3.0)

    @pytest.mark.parametrize(
        ("data", "error"),
        [
            (sse(chunk("a"), USAGE), "without [DONE]"),
            (sse(chunk("a")) + DONE, "0 tokens"),
            (sse(USAGE) + DONE, "0 chunks"),
            (sse(chunk("a"), {"error": {"message": "worker lost"}}) + DONE, "worker lost"),
            (b"data: {nonsense\n\n", "not JSON"),
            (b"", "without [DONE]"),
        ],
    )
    def test_failures_are_told(self, data: bytes, error: str) -> None:
        assert error in outcome((2.0, data)).error


class TestFigures:
    def test_percentiles_are_linear_between_values(self) -> None:
        assert [percentile([3, 1, 2, 4], percent) for percent in (0, 50, 90, 100)] == [1, 2.5, pytest.approx(3.7), 4]
        assert math.isnan(percentile([], 50))

    def test_groups_apart_and_failures_only_counted(self) -> None:
        steady = Outcome("steady", 0.0, 2.0, (0.5, 1.0, 2.0), prompt_tokens=10, completion_tokens=4)
        burst = Outcome("burst", 1.0, 1.5, error="status 429")
        figures = summarize([steady, burst, burst])
        assert figures["steady"]["ttft_ms_p50"] == 500
        assert figures["steady"]["tpot_ms_p50"] == 500
        assert figures["steady"]["itl_ms_p50"] == 750
        assert figures["steady"]["output_tokens_per_s"] == 2
        assert figures["steady"]["total_tokens_per_s"] == 7
        assert (figures["burst"]["requests"], figures["burst"]["failures"]) == (2, 2)

    def test_table_is_aligned(self) -> None:
        lines = table(["a", "long"], [["wide", "x"]]).splitlines()
        assert lines == ["| a    | long |", "| ---- | ---- |", "| wide | x    |"]


@asynccontextmanager
async def http_server(answer: Callable[[bytes], Awaitable[bytes]]) -> AsyncIterator[str]:
    """Run a server that answers each request with `answer(body of the request)` and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(h[15:]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length:")), 0)
        body = await answer(await reader.readexactly(length))
        status = b"429 Busy" if body.startswith(b"busy") else b"200 OK"
        writer.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class TestServer:
    async def test_never_runs_more_than_the_workload_allows(self) -> None:
        running = most = 0

        async def answer(body: bytes) -> bytes:
            nonlocal running, most
            if not body:
                return b'{"data": [{"id": "toy"}]}'
            assert json.loads(body)["prompt"] == [5, 6, 7]
            assert json.loads(body)["model"] == "toy"
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            return sse(chunk("abc", "length"), USAGE) + DONE

        async with http_server(answer) as url, Server(url) as server:
            outcomes = await server.run(Workload("toy", (REQUEST,) * 6, concurrency=2))
        assert [outcome.error for outcome in outcomes] == [""] * 6
        assert most == 2

    async def test_a_refusal_is_a_failure_with_its_reason(self) -> None:
        async def answer(body: bytes) -> bytes:
            return b"busy: come back later" if body else b'{"data": [{"id": "toy"}]}'

        async with http_server(answer) as url, Server(url) as server:
            (got,) = await server.run(Workload("toy", (REQUEST,), concurrency=1))
        assert got.error == "status 429: busy: come back later"

    async def test_what_is_no_such_server_is_told(self) -> None:
        async def answer(body: bytes) -> bytes:
            return b"<html>"

        async with http_server(answer) as url:
            with pytest.raises(ServerError, match="OpenAI-compatible"):
                await Server(url).__aenter__()
