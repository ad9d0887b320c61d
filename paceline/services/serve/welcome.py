"""The first requests to a stack: a health check, and a command for the user to paste."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from redis.exceptions import RedisError

from paceline.core import env
from paceline.core.config import ServeConfig
from paceline.core.errors import UnavailableError
from paceline.services.common.registry import connect, read_members
from paceline.services.serve.settings import served_name

SERVING_SECONDS = 30.0
"""Longest time until the gateway finds the workers, which are ready already, in seconds."""


async def wait_until_serving(host: str, port: int) -> None:
    """Wait until the gateway reports that it can place requests. Raises UnavailableError after SERVING_SECONDS."""
    try:
        async with asyncio.timeout(SERVING_SECONDS):
            while True:
                if await _is_healthy(_local(host), port):
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise UnavailableError("the gateway finds no worker although all are ready; see the log above") from None


async def numerics_in_use(redis: str, cluster: str) -> list[str]:
    """Return the numerics of the cluster's workers, each once; [] if Redis does not answer."""
    client = connect(redis)
    try:
        members = await read_members(client, cluster)
    except (RedisError, OSError):
        return []
    finally:
        await client.aclose()
    return sorted({str(member.numerics) for member in members if member.numerics is not None})


def first_request(config: ServeConfig, model: Path, port: int, numerics: Sequence[str] = ()) -> str:
    """Return a curl command that gets an answer from the stack.

    Args:
        model: the model's folder; if it has a chat template, the request is a chat.
        numerics: the numerics of the workers, for the user to read.
    """
    host = f"[{_local(config.host)}]" if ":" in config.host else _local(config.host)
    body: dict[str, object] = {"model": served_name(config), "max_tokens": 64}
    if config.chat_template or _has_chat_template(model):
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": "Why is the sky blue?"}]
    else:
        path = "completions"
        body["prompt"] = "The sky is blue because"
    lines = [f"curl http://{host}:{port}/v1/{path} -H 'Content-Type: application/json'", *_key_lines(config)]
    lines.append(f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}")
    request = " \\\n    ".join(lines)
    computing = f" Workers compute with {' and '.join(numerics)}." if numerics else ""
    return f"\nReady.{computing} Try it:\n\n  {request}\n\nCtrl-C stops.\n"


def _key_lines(config: ServeConfig) -> list[str]:
    # A key is never printed, because output ends up in logs.
    if config.api_key or config.api_keys_file:
        return ["-H 'Authorization: Bearer YOUR_KEY'"]
    return ['-H "Authorization: Bearer ${PACELINE_API_KEY%%,*}"'] if env.api_keys() else []


def _has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").exists() or (model / "chat_template.json").exists():
        return True
    try:
        return "chat_template" in json.loads((model / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False


def _local(host: str) -> str:
    """Return an address by which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


async def _is_healthy(host: str, port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()
