"""Send odd bodies to all routes that pool: no answer is a failure of the server, late, or has a wrong vector.

    python -m tests.fuzz.pooling --count 10000

The stack has an encoder, a reranker and a chat model. Results of a body are compared with those of its inputs alone,
bit for bit, and the vector of a text before and after all bodies. The exit code is 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from tokenizers import processors

from bench.common.services import serving
from tests.fuzz.pool_bodies import Json, OddBody, alone, inputs_of, random_body
from tests.models.pooling.tiny_encoders import POOLING, save_encoder, write_modules
from tests.services.gateway.toy_model import END, VOCAB_SIZE, write_toy_model
from tests.tiny_checkpoints import write_tiny

ANSWER_SECONDS = 60.0
"""Longest time of an answer, in seconds."""
AT_ONCE = 6
COMPARED = 2
"""Largest number of inputs of a body that are also sent alone."""
PLAIN: Mapping[str, Json] = {
    "/v1/embeddings": {"input": ["a b", "c"]},
    "/v1/score": {"text_1": "a", "text_2": ["b", "a c"]},
}
"""Bodies whose results are the same before and after all others."""
_LONGEST_ERROR = 1500


def write_encoder(folder: Path, head: str = "Model", **sizes: Any) -> None:
    """Write a random encoder whose tokens are bytes.

    Args:
        head: "Model" embeds; "ForSequenceClassification" has as many labels as `num_labels` says.
        sizes: fields of its config.json.
    """
    write_toy_model(folder, chat_template=None)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", pair="$A <|end|> $B:1 <|end|>:1", special_tokens=[("<|end|>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    save_encoder(folder, "bert", head, vocab_size=VOCAB_SIZE, **sizes)
    if head == "Model":
        write_modules(folder, ("Pooling", POOLING), ("Normalize", {}), prompts={"query": "q: "})


def write_models(folder: Path, chat: Json, **encoders: Any) -> Path:
    """Write a chat model, an encoder and a reranker, and the file for --models-file that names them.

    Args:
        chat: fields of the config.json of the chat model.
        encoders: fields of the config.json of the others.
    """
    write_toy_model(folder / "chat")
    write_tiny(folder / "chat", "llama", vocab_size=VOCAB_SIZE, eos_token_id=END, **chat)
    write_encoder(folder / "encoder", **encoders)
    write_encoder(folder / "reranker", "ForSequenceClassification", num_labels=1, **encoders)
    file = folder / "models.toml"
    pool = "".join(f'[{name}]\nmodel = "{folder / name}"\npool = 1\n' for name in ("encoder", "reranker"))
    file.write_text(f'[chat]\nmodel = "{folder / "chat"}"\n{pool}')
    return file


class PoolFuzz:
    """Sends bodies to a server, and keeps what is wrong."""

    def __init__(self, client: httpx.AsyncClient, models: list[str]) -> None:
        self.wrong: list[str] = []
        self.statuses: Counter[int] = Counter()
        self.compared = 0
        self.slowest = 0.0
        self._client = client
        self._models = models

    async def run(self, number: int) -> None:
        """Send the body with this number, and compare its results."""
        rng = random.Random(number)
        odd = random_body(rng, self._models)
        answer = await self._send(odd.route.path, odd.data, number)
        if answer is None or answer.status_code != 200 or odd.body is None:
            return
        if not answer.headers["content-type"].startswith("application/json"):
            return
        results = odd.route.results(answer.json())
        if len(results) != len(inputs_of(odd.route, odd.body)):
            if "top_n" not in odd.body:
                self.wrong.append(f"body {number}: {len(results)} results")
            return
        for index in rng.sample(range(len(results)), min(COMPARED, len(results))):
            await self._compare(odd, index, results[index], number)

    async def _compare(self, odd: OddBody, index: int, result: Any, number: int) -> None:
        assert odd.body is not None
        data = json.dumps(alone(odd.route, odd.body, index)).encode()
        answer = await self._send(odd.route.path, data, number)
        if answer is None or answer.status_code != 200:
            self.wrong.append(f"body {number}: input {index} is refused alone")
            return
        self.compared += 1
        (own,) = odd.route.results(answer.json())
        if own != result:
            self.wrong.append(f"body {number}: input {index} of {odd.route.path} has another result alone")

    async def _send(self, path: str, data: bytes, number: int) -> httpx.Response | None:
        """Send a body and return the answer. Note what is wrong with it."""
        begun = time.monotonic()
        place = f"body {number} to {path}"
        try:
            answer = await self._client.post(path, content=data, headers={"Content-Type": "application/json"})
        except httpx.HTTPError as error:
            self.wrong.append(f"{place}: {type(error).__name__}")
            return None
        self.slowest = max(self.slowest, time.monotonic() - begun)
        self.statuses[answer.status_code] += 1
        # TEI has 424 for failures of the server, and for tasks that a model does not have.
        is_failure = answer.status_code == 424 and "does not compute" not in answer.text
        if answer.status_code >= 500 or is_failure:
            self.wrong.append(f"{place}: {answer.status_code} {answer.text[:300]}")
        elif answer.status_code != 200 and not _is_clear(answer):
            self.wrong.append(f"{place}: no clear error: {answer.text[:300]}")
        return answer


def _is_clear(answer: httpx.Response) -> bool:
    """Return whether an error is a JSON object whose message says something, and not everything."""
    try:
        told = answer.json()["error"]
    except (ValueError, LookupError, TypeError):
        return False
    message = told["message"] if isinstance(told, dict) else told
    return isinstance(message, str) and 0 < len(message) <= _LONGEST_ERROR


async def fuzz_pooling(url: str, count: int, first: int = 0) -> list[str]:
    """Send `count` bodies to a server. Return what is wrong."""
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, trust_env=False) as client:
        models = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
        fuzz, numbers = PoolFuzz(client, models), iter(range(first, first + count))
        before = await _vectors(client, models)

        async def send() -> None:
            for number in numbers:
                await fuzz.run(number)

        await asyncio.gather(*(send() for _ in range(AT_ONCE)))
        if await _vectors(client, models) != before:
            fuzz.wrong.append("a text has another vector than before")
        if (await client.get("/health")).status_code != 200:
            fuzz.wrong.append("the server is not healthy any more")
    print(
        f"{count} bodies, {fuzz.compared} inputs compared with themselves alone, slowest answer {fuzz.slowest:.2f} s, "
        f"statuses {dict(sorted(fuzz.statuses.items()))}, {len(fuzz.wrong)} wrong"
    )
    return fuzz.wrong


async def _vectors(client: httpx.AsyncClient, models: list[str]) -> list[Any]:
    """Return the results that some texts have in plain bodies."""
    found = []
    for model in models:
        for path, body in PLAIN.items():
            answer = (await client.post(path, json={"model": model, **body})).json()
            found.append([{**each, "index": 0} for each in answer.get("data", ())])
    assert any(found)
    return found


@contextmanager
def running_stack(folder: Path) -> Iterator[str]:
    """Start a stack with all kinds of models. Yield its URL."""
    models = write_models(folder, {"max_position_embeddings": 512})
    options = (f"--models-file={models}", "--threads=1", "--kv-memory=16MiB", f"--store={folder}/store.db")
    with serving(folder / "log", *options) as (process, url):
        yield url
        bad = [line for line in process.text.splitlines() if "unexpected error" in line or "Traceback" in line]
        if bad:
            raise RuntimeError("\n".join(bad[:20]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.pooling", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="number of bodies [%(default)s]")
    parser.add_argument("--first", type=int, default=0, help="number of the first one, which is its seed")
    parser.add_argument("--url", default="", help="a running server [one that this command starts]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        if args.url:
            wrong = asyncio.run(fuzz_pooling(args.url, args.count, args.first))
        else:
            with running_stack(Path(folder)) as url:
                wrong = asyncio.run(fuzz_pooling(url, args.count, args.first))
    for sentence in wrong[:40]:
        print(f"WRONG: {sentence}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
