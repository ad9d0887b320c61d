"""Every route, asked by plain clients of HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts

from paceline.core.config import GatewayConfig
from paceline.services.gateway.app import create_app
from paceline.services.gateway.gateway import Gateway, load_models
from tests.services.gateway.conftest import PATIENCE, Stack, StartStack

ENDLESS = ("/console/feed",)
"""Answers that end only with their client."""
JSON = "application/json"


@dataclass(frozen=True)
class Answer:
    """What came on a connection until the server closed it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def stable(self) -> dict[str, str]:
        """The headers that do not change from one request to the next."""
        return {
            name: value for name, value in self.headers.items() if name not in ("date", "x-request-id", "request-id")
        }


@dataclass
class Plain:
    """A client that writes a request as it is and reads until the connection ends."""

    stack: Stack
    routes: list[tuple[str, str]]
    """Method and path of each route."""

    async def ask(
        self, method: str, path: str, body: bytes = b"", version: str = "1.1", until: bytes = b"", **headers: str
    ) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.stack.url.rpartition(":")[2]))
        named = {"host": "localhost", "connection": "close", "content-length": str(len(body)), **headers}
        if version == "1.0":
            del named["host"], named["connection"]
        lines = [
            f"{method} {path} HTTP/{version}",
            *(f"{name.replace('_', '-')}: {value}" for name, value in named.items()),
        ]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        async with asyncio.timeout(PATIENCE):
            got = await (reader.readuntil(until) if until else reader.read())
        writer.close()
        head, _, content = got.partition(b"\r\n\r\n")
        status, *rest = head.decode().split("\r\n")
        pairs = (line.split(": ", 1) for line in rest)
        return Answer(int(status.split()[1]), {name.lower(): value for name, value in pairs}, content)


@pytest.fixture(scope="session")
def routes(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    config = GatewayConfig(model=str(toy_model), store=str(tmp_path_factory.mktemp("store") / "store.db"))
    app = create_app(Gateway(config, load_models(config)))
    return [
        (method, re.sub("{.*?}", "unknown", str(each.path)))
        for each in iter_route_contexts(app.routes)
        for method in sorted(each.methods or ())
        if each.path != "/openapi.json"
    ]


@pytest.fixture
async def plain(start_stack: StartStack, tmp_path: Path, routes: list[tuple[str, str]]) -> Plain:
    return Plain(await start_stack(store=str(tmp_path / "store.db")), routes)


async def test_http_1_0_gets_bodies_as_they_are(plain: Plain) -> None:
    for method, path in plain.routes:
        if path in ENDLESS:
            continue
        content = b"{}" if method != "GET" else b""
        answer = await plain.ask(method, path, content, version="1.0", content_type=JSON)
        assert "transfer-encoding" not in answer.headers, path
        assert answer.headers["connection"] == "close"
        assert len(answer.body) == int(answer.headers["content-length"])


STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 16}),
    ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}),
]


async def test_streams_of_http_1_0_are_events_and_nothing_else(plain: Plain) -> None:
    for path, asked in STREAMS:
        sent = json.dumps({**asked, "model": "toy", "stream": True, "seed": 1}).encode()
        old, new = [
            await plain.ask("POST", path, sent, version=version, content_type=JSON, expect="100-continue")
            for version in ("1.0", "1.1")
        ]
        assert (old.status, new.status) == (200, 100), path
        assert "transfer-encoding" not in old.headers
        blocks = old.body.decode().split("\n\n")
        assert len(blocks) > 3
        assert blocks.pop() == ""
        assert all(block.startswith(("data: ", "event: ")) for block in blocks)
        assert b"transfer-encoding: chunked" in new.body


async def test_head_is_get_without_the_body(plain: Plain) -> None:
    for method, path in plain.routes:
        if method != "GET" or path in ENDLESS:
            continue
        got, head = [await plain.ask(each, path) for each in ("GET", "HEAD")]
        assert (head.status, head.body) == (got.status, b""), path
        if path != "/metrics":  # its body grows
            assert head.stable == got.stable, path


async def test_head_of_a_stream_ends_it(plain: Plain) -> None:
    answer = await plain.ask("HEAD", "/console/feed")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_other_methods_are_told_which_ones_there_are(plain: Plain) -> None:
    for path in {path for _, path in plain.routes}:
        methods = {method for method, each in plain.routes if each == path}
        methods |= {"HEAD"} if "GET" in methods else set()
        for wrong in ("OPTIONS", "PATCH"):
            answer = await plain.ask(wrong, path)
            assert answer.status == 405, (wrong, path)
            assert methods <= set(answer.headers["allow"].split(", ")), (path, answer.headers)


async def test_slashes_too_many_change_nothing(plain: Plain) -> None:
    for method, path in plain.routes:
        if path in ENDLESS:
            continue
        content = b"{}" if method != "GET" else b""
        spelled = [path, "/" + path, path.replace("/", "//", 2), path + ("" if path.endswith("/unknown") else "/")]
        answers = [await plain.ask(method, each, content, content_type=JSON) for each in spelled]
        assert len({answer.status for answer in answers}) == 1, (method, path, [answer.status for answer in answers])


async def test_strange_bodies_get_an_answer_in_json(plain: Plain) -> None:
    bodies = [
        (b"", {}),
        (b"", {"content_type": JSON}),
        (b"{}", {}),
        (b"{}", {"content_type": "text/plain"}),
        (b"{}", {"content_type": "application/x-www-form-urlencoded"}),
        (b"{}", {"content_type": f"{JSON}; charset=latin-1"}),
        ("\ufeff{}".encode(), {"content_type": JSON}),
        ("{}".encode("utf-16"), {"content_type": f"{JSON}; charset=utf-16"}),
        (b"\xff\xfe", {"content_type": JSON}),
        (b"null", {"content_type": JSON}),
        (gzip.compress(b"{}"), {"content_type": JSON, "content_encoding": "gzip"}),
        (b"{}", {"content_type": JSON, "content_encoding": "gzip"}),
        (b"{}", {"content_type": JSON, "content_encoding": "br"}),
    ]
    for method, path in plain.routes:
        if method != "POST":
            continue
        for content, headers in bodies:
            answer = await plain.ask(method, path, content, **headers)
            assert answer.status < 500, (path, content, headers, answer)
            if answer.status >= 400:
                error = json.loads(answer.body)["error"]
                # Routes of text-embeddings-inference answer as its clients expect: with a text.
                assert error if isinstance(error, str) else error["message"], (path, content, headers)


async def test_a_target_without_a_path_is_answered(plain: Plain) -> None:
    for target in ("*", "http://localhost", "http://localhost/ping", "?x"):
        answer = await plain.ask("GET", target)
        assert answer.status < 500, target
