"""An API below a path, behind proxies that take the path off and proxies that leave it there."""

from __future__ import annotations

import pytest

from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError
from paceline.services.gateway.access.decisions import DECISIONS
from paceline.services.gateway.root_path import check_root_path
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
