"""An API below a path, behind proxies that take the path off and proxies that leave it there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError
from paceline.services.gateway.http.paths import DECISIONS, check_root_path, spelled_as_route
from tests.services.gateway.conftest import StartStack


async def test_the_path_may_be_there_or_not(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=0, root_path="/llm")
    for path in ("/ping", "/llm/ping"):
        assert (await stack.http.get(path)).status_code == 200
    for path in ("/llmping", "/llm/llm/ping", "/other/ping"):
        assert (await stack.http.get(path)).status_code == 404


async def test_it_opens_no_way_around_the_keys(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=0, root_path="/llm", api_key="key")
    for path in ("/v1/models", "/llm/v1/models", "/fleet", "/llm/fleet"):
        assert (await stack.http.get(path)).status_code == 401
        assert (await stack.http.get(path, headers={"authorization": "Bearer key"})).status_code == 200
    for path in ("/llm/llm/v1/models", "//llm/v1/models", "/llm//v1/models"):
        assert (await stack.http.get(path)).status_code in (401, 404)


async def test_the_schema_names_it(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=0, root_path="/llm")
    assert (await stack.http.get("/llm/openapi.json")).json()["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("path", ["llm", "/llm/", "/"])
def test_it_is_a_path_without_an_end(path: str) -> None:
    with pytest.raises(ConfigError, match="--root-path must begin with /"):
        GatewayConfig(root_path=path)


@pytest.mark.parametrize("path", ["/v1", "/v1/chat", "/health"])
def test_it_is_no_beginning_of_a_path_of_the_api(path: str) -> None:
    with pytest.raises(ConfigError, match="is the beginning of a path of the API"):
        check_root_path(path, DECISIONS)


@pytest.mark.parametrize("path", ["", "/llm", "/v", "/v1x"])
def test_other_paths_are_allowed(path: str) -> None:
    check_root_path(path, DECISIONS)


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("///v1////chat//completions//", "/v1/chat/completions"),
        ("/v1/models/", "/v1/models"),
        ("/v1/models//", "/v1/models"),
        ("//", "/"),
        ("/v1//files/file-1/content", "/v1/files/file-1/content"),
        ("/v1/files/file-1/", "/v1/files/file-1"),
        # The name of a model may be a path.
        ("/v1/models//models/llama", "/v1/models//models/llama"),
        ("/v1//models//models/llama", "/v1/models//models/llama"),
        ("/v1/models/org/llama/", "/v1/models/org/llama/"),
        # No route.
        ("/nothing//here/", "/nothing//here/"),
        ("/v1//" + "x//" * 20_000, "/v1//" + "x//" * 20_000),
        ("", "/"),
    ],
)
def test_slashes_too_many_lead_to_the_route_that_is_meant(spelled: str, meant: str) -> None:
    assert spelled_as_route(spelled) == meant


@given(st.sampled_from(sorted(path for path in DECISIONS if "{" not in path)), st.data())
def test_every_route_is_found_with_slashes_anywhere(path: str, data: st.DataObject) -> None:
    parts = path.split("/")[1:]
    spelled = "".join("/" * data.draw(st.integers(1, 3)) + part for part in parts) + "/" * data.draw(st.integers(0, 2))
    assert spelled_as_route(spelled) == path


async def test_another_spelling_needs_the_same_key(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=0, api_key="key", admin_key="admin")
    for path in ("/fleet/", "//fleet", "/%2ffleet", "/fleet/scale/", "//console/feed", "//"):
        assert (await stack.http.get(stack.url + path)).status_code == 401
        assert (await stack.http.get(stack.url + path, headers={"x-api-key": "key"})).status_code == 403
