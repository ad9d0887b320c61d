"""No value in a body or a query is the server's fault: each is answered with a sentence, whatever its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.services.gateway.api.test_api_schema import MESSAGES, POSTED
from tests.services.gateway.conftest import StartStack

Json = dict[str, Any]

JSON = {"Content-Type": "application/json"}

LONG = 10**399
VALUES: list[Any] = [
    LONG,
    -(10**308),
    1e308,
    2**63,
    -(2**63) - 1,
    "9" * 399,
    "\udfff",
    "a\0",
    {"9" * 5000: LONG},
    [[LONG]],
]
QUERIES = ["9" * 400, "-" + "9" * 5000, "1e400", "%00", "%ff%fe", "%ED%A0%80", "\u0661"]
FIELDS = ("seed", "max_tokens", "n", "logit_bias", "stop", "stop_token_ids", "metadata", "id", "request_id", "user")
"""Fields that are added to each body, besides those that it has."""


async def test_no_value_of_a_body_fails(start_stack: StartStack, tmp_path: Path) -> None:
    stack = await start_stack(store=str(tmp_path / "store.db"), score_tokens="y, n")
    made = (await stack.post("/v1/conversations")).json()["id"]
    bodies: list[tuple[str, Json]] = [
        *((path, body) for path, body in POSTED if len(json.dumps(body)) < 120),
        ("/v1/conversations", {"items": MESSAGES, "metadata": {"a": "b"}}),
        (f"/v1/conversations/{made}", {"metadata": {"a": "b"}}),
        (f"/v1/conversations/{made}/items", {"items": MESSAGES}),
        ("/v1/responses", {"input": "x", "previous_response_id": "y", "conversation": "z"}),
        ("/v1/messages/batches", {"requests": [{"custom_id": "x", "params": {"messages": MESSAGES, "max_tokens": 1}}]}),
        ("/v1/batches", {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"}),
    ]
    for path, body in bodies:
        for value in VALUES:
            for changed in _changed({**dict.fromkeys(FIELDS), **body}, value):
                is_object = isinstance(changed, dict)
                sent = {name: each for name, each in changed.items() if each is not None} if is_object else changed
                answer = await stack.http.post(path, content=json.dumps(sent), headers=JSON)
                assert answer.status_code < 500, (path, sent, answer.text)
                if not answer.is_success:
                    assert answer.json()["error"]["message"], (path, sent)


async def test_no_value_of_a_query_fails(start_stack: StartStack, tmp_path: Path) -> None:
    stack = await start_stack(store=str(tmp_path / "store.db"))
    made = (await stack.post("/v1/conversations", items=MESSAGES)).json()["id"]
    kept = (await stack.post("/v1/responses", input="x", max_output_tokens=1)).json()["id"]
    lists = ("/v1/files", "/v1/batches", "/v1/messages/batches", f"/v1/conversations/{made}/items")
    paths = [f"{path}?{name}=" for path in lists for name in ("limit", "after", "after_id", "before_id", "order")]
    paths += [f"/v1/responses/{kept}?starting_after=", f"/v1/responses/{kept}/input_items?after=", "/fleet/steps?last="]
    paths += ["/v1/files/", "/v1/batches/", "/v1/responses/", "/v1/conversations/", "/trace/", "/v1/models/"]
    for path in paths:
        for value in QUERIES:
            answer = await stack.http.get(path + value)
            assert answer.status_code < 500, (path, value, answer.text)


def _changed(value: Any, other: Any) -> Iterator[Any]:
    """Yield a JSON value once for each value in it, with the other one in its place."""
    if isinstance(value, dict | list):
        for place, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
            for changed in _changed(each, other):
                copy: Any = value.copy()
                copy[place] = changed
                yield copy
    yield other
