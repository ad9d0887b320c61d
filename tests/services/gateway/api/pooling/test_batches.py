"""Lines of batches that embed, rank and classify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.services.gateway.conftest import StartStack, eventually
from tests.services.gateway.toy_pooling import DIM

LINES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v2/embed": {"texts": ["a"]},
    "/pooling": {"input": "a", "task": "token_embed"},
    "/v1/rerank": {"query": "a", "documents": ["a", "b"]},
}


async def test_lines_of_a_batch(start_stack: StartStack, encoder: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    stack = await start_stack(prefill=0, decode=0, pool=1, model=str(encoder), store=store)
    for url, body in LINES.items():
        line = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})
        uploaded = await stack.http.post("/v1/files", files={"file": line.encode()}, data={"purpose": "batch"})
        made = {"input_file_id": uploaded.json()["id"], "endpoint": url, "completion_window": "24h"}
        batch: dict[str, Any] = (await stack.http.post("/v1/batches", json=made)).json()

        async def is_over(batch_id: str = batch["id"]) -> bool:
            nonlocal batch
            batch = (await stack.http.get(f"/v1/batches/{batch_id}")).json()
            return batch["status"] in ("completed", "failed")

        await eventually(is_over)
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}, url
        content = (await stack.http.get(f"/v1/files/{batch['output_file_id']}/content")).json()
        answer = content["response"]["body"]
        assert answer.keys() & {"data", "embeddings", "results"}
        if url == "/v1/embeddings":
            assert [len(each["embedding"]) for each in answer["data"]] == [DIM, DIM]


async def test_a_line_is_answered_with_json(start_stack: StartStack, encoder: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    stack = await start_stack(prefill=0, decode=0, pool=1, model=str(encoder), store=store)
    body = {"input": "a", "encoding_format": "bytes"}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body})
    uploaded = await stack.http.post("/v1/files", files={"file": line.encode()}, data={"purpose": "batch"})
    made = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    batch = (await stack.http.post("/v1/batches", json=made)).json()

    async def has_failed() -> bool:
        told = (await stack.http.get(f"/v1/batches/{batch['id']}")).json()
        return told["status"] == "failed" and told["errors"]["data"][0]["param"] == "body.encoding_format"

    await eventually(has_failed)
