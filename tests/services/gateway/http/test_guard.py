"""Every route of the real application, with every kind of key, from here and from elsewhere."""

from __future__ import annotations

import base64
import contextlib
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError
from paceline.services.gateway.app import create_app
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.access.callers import Caller
from paceline.services.gateway.http.middleware import LINE_CALLER
from paceline.services.gateway.http.paths import DECISIONS, Access, check_decided, decision_for, paths_of
from paceline.services.gateway.planning.tokenizer import Tokenizer

HERE = ("127.0.0.1", 4000)
ELSEWHERE = ("203.0.113.9", 4000)
KEYS = {"client": "key-of-alice", "other client": "key-of-bob", "admin": "key-of-root", "wrong": "nobodys-key"}
OPTIONS: dict[str, dict[str, str]] = {
    "no keys": {},
    "client keys": {"api_key": "key-of-alice, key-of-bob"},
    "admin keys": {"admin_key": "key-of-root"},
    "both": {"api_key": "key-of-alice,key-of-bob", "admin_key": "key-of-root"},
}


@dataclass(frozen=True)
class Gate:
    """An application that has not started, so that nothing but a refusal or an answer without workers comes."""

    app: FastAPI

    def client(self, client: tuple[str, int] = HERE, host: str = "127.0.0.1") -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, client=client)
        headers = {"content-type": "application/json"}
        return httpx.AsyncClient(transport=transport, base_url=f"http://{host}:8000", headers=headers)

    async def ask(
        self, path: str, client: tuple[str, int] = HERE, method: str = "GET", host: str = "127.0.0.1", **headers: str
    ) -> httpx.Response:
        async with self.client(client, host) as http:
            return await send(http, method, path, {name.replace("_", "-"): value for name, value in headers.items()})


async def send(http: httpx.AsyncClient, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    return await http.request(method, path, content=b"{}" if method == "POST" else None, headers=headers)


MakeGate = Callable[..., Gate]


@pytest.fixture
async def make_gate(toy_model: Path, toy_tokenizer: Tokenizer, redis_server: str) -> AsyncIterator[MakeGate]:
    async with contextlib.AsyncExitStack() as closing:

        def make(**options: Any) -> Gate:
            named = {"model": str(toy_model), "store": "none", "redis": redis_server, **options}
            config = GatewayConfig(**named)
            gateway = Gateway(config, [(config, toy_tokenizer)])
            closing.push_async_callback(gateway.close)
            for fleet in gateway.models.values():
                fleet.runner.worker_wait.abort()  # there is no fleet for which a request could wait
            return Gate(create_app(gateway))

        yield make


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Return the method and the path of every route."""
    found = [(method, str(each.path)) for each in iter_route_contexts(app.routes) for method in each.methods or ()]
    return sorted(found)


def may_call(access: Access, kind: str, is_here: bool, options: dict[str, str]) -> bool:
    """Return what the documentation says about one cell of the table."""
    known = {"client": "api_key", "other client": "api_key", "admin": "admin_key"}
    has_key = known.get(kind, "") in options
    if access is Access.OPEN:
        return True
    if access is Access.CLIENT:
        return "api_key" not in options or has_key
    if "admin_key" in options:
        return kind == "admin"
    return is_here and ("api_key" not in options or has_key)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("client", [HERE, ELSEWHERE])
async def test_every_route_with_every_key(make_gate: MakeGate, name: str, client: tuple[str, int]) -> None:
    gate, cells = make_gate(**OPTIONS[name]), 0
    async with gate.client(client) as http:
        for (method, path), kind in product(routes(gate.app), ("no", *KEYS)):
            headers = {"authorization": f"Bearer {KEYS[kind]}"} if kind in KEYS else {}
            answer = await send(http, method, re.sub(r"\{.*?\}", "x", path), headers)
            cell = f"{method} {path} with {kind} key: {answer.status_code} {answer.text}"
            expected = may_call(DECISIONS[path], kind, client == HERE, OPTIONS[name])
            assert (answer.status_code not in (401, 403)) == expected, cell
            assert answer.status_code != 500, cell
            if answer.status_code == 401:
                assert "key is needed" in answer.text, cell
                scheme = "Basic" if DECISIONS[path] is Access.ADMIN else "Bearer"
                assert answer.headers["www-authenticate"].startswith(scheme), cell
            cells += 1
    assert cells > 5 * 40


async def test_every_route_has_a_decision_and_every_decision_a_route(make_gate: MakeGate) -> None:
    app = make_gate().app
    assert {path for _, path in routes(app)} == set(DECISIONS)
    assert set(paths_of(app.routes)) == set(DECISIONS)
    for path, access in DECISIONS.items():
        assert decision_for(re.sub(r"\{.*?\}", "x", path)) is access


def test_few_routes_are_open_and_those_that_change_the_fleet_are_for_admins() -> None:
    paths = {access: {path for path in DECISIONS if DECISIONS[path] is access} for access in Access}
    assert paths[Access.OPEN] == {"/health", "/ping", "/version", "/metrics", "/openapi.json"}
    assert paths[Access.ADMIN] >= {"/fleet", "/fleet/scale", "/reset_prefix_cache", "/server_info"}


async def test_an_application_with_an_undecided_route_does_not_start(make_gate: MakeGate) -> None:
    app = make_gate().app
    app.get("/v1/models/hidden")(lambda: None)
    app.mount("/files", FastAPI())
    with pytest.raises(LookupError, match=r"who may call /files/\{path:path\}, /v1/models/hidden: add it"):
        check_decided(app.routes)


async def test_an_undecided_route_cannot_be_called(make_gate: MakeGate) -> None:
    gate = make_gate()
    gate.app.get("/hidden")(lambda: {"secret": 1})
    answer = await gate.ask("/hidden")
    assert (answer.status_code, "secret" in answer.text) == (404, False)


@pytest.mark.parametrize("path", ["/nothing", "/FLEET", "/v1", "/fleet/x", "/%2e%2e/fleet"])
async def test_unknown_paths_tell_nothing(make_gate: MakeGate, path: str) -> None:
    assert (await make_gate().ask(path)).status_code == 404
    gate = make_gate(**OPTIONS["both"])
    assert (await gate.ask(path)).status_code == 401
    known = await gate.ask(path, authorization="Bearer key-of-alice")
    assert known.status_code == 404
    assert known.json()["error"]["message"].startswith("no such path")


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/chat/completions", "; do you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "; do you mean /v1/messages?"),
        ("/v1/nothing", "/v1/nothing"),
    ],
)
async def test_a_missing_path_says_why(make_gate: MakeGate, path: str, end: str) -> None:
    message = (await make_gate().ask(path)).json()["error"]["message"]
    assert message.startswith(f"no such path: GET {path}")
    assert message.endswith(end)


async def test_a_wrong_method_is_refused_as_the_right_one(make_gate: MakeGate) -> None:
    gate = make_gate(**OPTIONS["both"])
    assert (await gate.ask("/fleet", method="DELETE")).status_code == 401
    allowed = await gate.ask("/fleet", method="DELETE", authorization="Bearer key-of-root")
    assert (allowed.status_code, allowed.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer key-of-root"},
        {"authorization": "bearer   key-of-root "},
        {"x_api_key": "key-of-root"},
        {"x_api_key": "key-of-alice", "authorization": "Bearer key-of-root"},
        {"authorization": "Basic " + base64.b64encode(b"anybody:key-of-root").decode()},
    ],
)
async def test_ways_to_send_a_key(make_gate: MakeGate, headers: dict[str, str]) -> None:
    assert (await make_gate(**OPTIONS["both"]).ask("/fleet", ELSEWHERE, **headers)).status_code == 200


@pytest.mark.parametrize("value", ["key-of-root", "Basic key-of-root", "Basic !", "Basic", "Digest key-of-root", ""])
async def test_what_is_no_key(make_gate: MakeGate, value: str) -> None:
    assert (await make_gate(**OPTIONS["both"]).ask("/fleet", authorization=value)).status_code == 401


async def test_a_refusal_says_what_to_do(make_gate: MakeGate) -> None:
    async def message(options: str, client: tuple[str, int], **headers: str) -> str:
        answer = await make_gate(**OPTIONS[options]).ask("/fleet", client, **headers)
        return f"{answer.status_code} {answer.json()['error']['message']}"

    assert "401 a valid admin key is needed: send" in await message("both", HERE)
    assert "403 the key 'key-1' is a client's" in await message("both", HERE, x_api_key="key-of-alice")
    assert "start the gateway with PACELINE_ADMIN_KEY" in await message("no keys", ELSEWHERE)
    assert "PACELINE_ADMIN_KEY" in await message("no keys", HERE, x_forwarded_for="127.0.0.1")
    assert "a valid API key is needed" in await message("client keys", HERE)
    assert "403 open the gateway as localhost" in await message("no keys", HERE, host="evil.example")


async def test_pages_of_other_sites_cannot_use_admin_routes(make_gate: MakeGate) -> None:
    here, keyed = make_gate(), make_gate(**OPTIONS["both"])
    basic = "Basic " + base64.b64encode(b":key-of-root").decode()
    for page in ({"sec_fetch_site": "cross-site"}, {"origin": "https://evil.example"}):
        assert (await here.ask("/reset_prefix_cache", method="POST", **page)).status_code == 403
        assert (await keyed.ask("/fleet", ELSEWHERE, authorization=basic, **page)).status_code == 403
        # A browser keeps the password and adds it to the requests of other pages, too.
        assert (await keyed.ask("/v1/models", ELSEWHERE, authorization=basic, **page)).status_code == 403
        assert (await keyed.ask("/v1/models", ELSEWHERE, x_api_key="key-of-root", **page)).status_code == 200
    own = {"sec_fetch_site": "same-origin", "origin": "http://127.0.0.1:8000"}
    assert (await here.ask("/reset_prefix_cache", method="POST", **own)).status_code == 200


async def test_pages_of_allowed_origins_ask_before_they_send_a_key(make_gate: MakeGate) -> None:
    origin = "https://chat.example.com"
    gate = make_gate(allowed_origins=origin, **OPTIONS["both"])
    asks = {"origin": origin, "access_control_request_method": "POST", "access_control_request_headers": "x-api-key"}
    before = await gate.ask("/v1/chat/completions", ELSEWHERE, "OPTIONS", **asks)
    assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, origin)
    assert "x-api-key" in before.headers["access-control-allow-headers"]
    answer = await gate.ask("/v1/models", ELSEWHERE, origin=origin, x_api_key="key-of-alice")
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
    refused = await gate.ask("/v1/models", ELSEWHERE, origin=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
    other = await gate.ask("/v1/models", ELSEWHERE, origin="https://evil.example", x_api_key="key-of-alice")
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_origins": "chat.example.com"}, "is no origin; write https://"),
        ({"allowed_origins": '["*"]'}, "is no origin"),
        ({"allowed_origins": "https://a.example/path"}, "is no origin"),
        ({"allowed_origins": "1://a"}, "is no origin"),
        ({"allowed_origins": "*", "allow_credentials": True}, "--allow-credentials needs named origins"),
    ],
)
async def test_origins_that_cannot_be_meant(make_gate: MakeGate, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_gate(**options)


async def test_a_request_of_the_gateway_itself_is_its_caller_s(make_gate: MakeGate) -> None:
    app, statuses = make_gate(**OPTIONS["both"]).app, []

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    async def receive() -> Any:
        return {"type": "http.request"}

    for path, expected in (("/v1/models", 200), ("/v1/nothing", 404)):
        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
        scope[LINE_CALLER] = Caller("key-1", "digest of the key", is_admin=False)
        await app(scope, receive, send)
        assert statuses[0] == expected
        statuses.clear()


PAGES = [
    {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"},
    {"sec_fetch_site": "same-site", "origin": "http://localhost:3000"},
    {"origin": "https://evil.example"},
    {"origin": "null"},
]
"""Headers that browsers send for pages of others, the older ones without Sec-Fetch-Site."""


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/files"), ("POST", "/v1/completions"), ("POST", "/tokenize")])
async def test_pages_of_others_need_a_key(make_gate: MakeGate, page: dict[str, str], method: str, path: str) -> None:
    gate = make_gate()
    for client in (HERE, ELSEWHERE):
        answer = await gate.ask(path, client, method, **page)
        assert answer.status_code == 403
        known = page.get("origin", "null")
        assert f"--allowed-origins {'ORIGIN' if known == 'null' else known}" in answer.text
    assert (await gate.ask(path, HERE, method)).status_code not in (401, 403)
    assert (await gate.ask("/ping", HERE, **page)).status_code != 403
    keyed = make_gate(**OPTIONS["client keys"])
    assert (await keyed.ask("/v1/models", ELSEWHERE, authorization="Bearer key-of-alice", **page)).status_code == 200


@pytest.mark.parametrize("origin", ["http://localhost:3000", "app://obsidian.md", "vscode-webview://abc", "*"])
async def test_pages_of_configured_origins_need_none(make_gate: MakeGate, origin: str) -> None:
    sent = "http://anywhere.example" if origin == "*" else origin
    gate = make_gate(allowed_origins=origin)
    page = {"sec_fetch_site": "cross-site", "origin": sent}
    assert (await gate.ask("/v1/models", HERE, **page)).status_code == 200
    assert (await gate.ask("/fleet", HERE, **page)).status_code == 403
    other = await gate.ask("/v1/models", HERE, sec_fetch_site="cross-site", origin="http://other.example")
    assert other.status_code == (200 if origin == "*" else 403)


async def test_a_foreign_name_that_points_here_needs_a_key(make_gate: MakeGate) -> None:
    """For the browser, a page of such a name and the gateway have one origin (DNS rebinding)."""
    page, gate = {"sec_fetch_site": "same-origin"}, make_gate()
    refused = await gate.ask("/v1/files", HERE, host="evil.example", **page)
    assert (refused.status_code, "'evil.example:8000' in Host may be a trick" in refused.text) == (403, True)
    for host in (
        "localhost",
        "127.0.0.1",
        socket.gethostname(),
        f"{socket.gethostname()}.local",
        "host.docker.internal",
    ):
        assert (await gate.ask("/v1/models", HERE, host=host, **page)).status_code == 200
    # The gateway does not know the names that others use.
    assert (await gate.ask("/v1/models", ELSEWHERE, host="llm.example", **page)).status_code == 200
    named = make_gate(allowed_origins="http://llm.example:8000")
    assert (await named.ask("/v1/models", HERE, host="llm.example", **page)).status_code == 200
    assert (await named.ask("/v1/models", HERE, host="evil.example", **page)).status_code == 403


@pytest.mark.parametrize("name", ["forwarded", "x_forwarded_for", "x_forwarded_host", "x_real_ip"])
async def test_a_rebound_page_gains_nothing_by_the_headers_of_a_proxy(make_gate: MakeGate, name: str) -> None:
    proxy, gate = {name: "203.0.113.9"}, make_gate()
    for path in ("/v1/files", "/fleet", "/nothing"):
        assert (await gate.ask(path, host="evil.example", sec_fetch_site="same-origin", **proxy)).status_code == 403
    assert (await gate.ask("/fleet")).status_code == 200
    # A proxy whose clients use another name needs its origin allowed, and counts as a proxy then.
    named = make_gate(allowed_origins="https://llm.example:8000")
    assert (await named.ask("/v1/models", host="llm.example", **proxy)).status_code == 200
    assert (await named.ask("/fleet")).status_code == 403


@pytest.mark.parametrize(
    ("options", "is_admin", "who"),
    [
        ({}, True, None),
        ({"api_key": "key-of-alice"}, True, "every client that runs on this machine is an admin"),
        ({"host": "0.0.0.0"}, True, None),
        ({"host": "0.0.0.0", "api_key": "key-of-alice"}, False, "nobody is an admin"),
        ({"host": "::", "api_key": "key-of-alice", "uds": "/run/paceline.sock"}, True, "every client"),
        ({"host": "0.0.0.0", "api_key": "key-of-alice", "admin_key": "key-of-root"}, False, None),
    ],
)
async def test_who_is_an_admin_without_a_key(
    make_gate: MakeGate, caplog: pytest.LogCaptureFixture, options: dict[str, str], is_admin: bool, who: str | None
) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        gate = make_gate(**options)
    assert [who in record.message for record in caplog.records if "admin" in record.message] == [True] * (
        who is not None
    )
    answer = await gate.ask("/fleet", HERE, authorization="Bearer key-of-alice")
    assert answer.status_code == (200 if is_admin else 403)
    if not is_admin:
        assert "PACELINE_ADMIN_KEY" in answer.text or "send an admin key" in answer.text
        trace = await gate.ask("/v1/batches", HERE, authorization="Bearer key-of-alice")
        assert trace.status_code != 403


async def test_a_page_that_is_refused_takes_no_rights_away(make_gate: MakeGate) -> None:
    gate = make_gate()
    assert (await gate.ask("/v1/models", origin="null", x_forwarded_for="203.0.113.9")).status_code == 403
    assert (await gate.ask("/fleet", ELSEWHERE, x_forwarded_for="127.0.0.1")).status_code == 403
    assert (await gate.ask("/fleet")).status_code == 200


async def test_nobody_is_an_admin_after_a_proxy_was_seen(make_gate: MakeGate) -> None:
    gate = make_gate(api_key="key-of-alice")
    key = {"authorization": "Bearer key-of-alice"}
    await gate.ask("/v1/models", x_forwarded_for="203.0.113.9")  # a stranger, who is refused
    assert (await gate.ask("/fleet", **key)).status_code == 200
    await gate.ask("/v1/models", x_forwarded_for="203.0.113.9", **key)
    assert (await gate.ask("/fleet", **key)).status_code == 403


async def test_a_proxy_without_an_admin_key_is_warned_of_once(
    make_gate: MakeGate, caplog: pytest.LogCaptureFixture
) -> None:
    gate, guarded = make_gate(), make_gate(admin_key="key-of-root")
    with caplog.at_level(logging.WARNING, "paceline"):
        for each in (guarded, gate, gate):
            await each.ask("/v1/models", x_forwarded_for="203.0.113.9")
        await gate.ask("/v1/models")
    assert [record.name for record in caplog.records].count("paceline.services.gateway.http.guard") == 1
