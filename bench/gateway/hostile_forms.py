"""Requests at the limits of each route of the API, for `bench.gateway.hostile_bodies`. Pure functions of /openapi.json.

`ALIASES` and `LEFT_OUT` name the paths for clients that are not attacked, so that no new route is forgotten.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.services.gateway.http.paths import DECISIONS, Access

Json = dict[str, Any]
Make = Callable[[], object]

MIB = 1 << 20
VALUES, OBJECTS, BYTES = 490_000, 49_000, 31 * MIB
"""A little less than the gateway accepts by default."""
TEXT = 1_000_000
"""Characters of the longest text that is tokenized at once."""
COUNTS = 1000, 2048, 9999
"""Numbers of entries at which routes have limits: pairs of texts, inputs of pooling, messages."""
LONGEST_PATH = 14_000
"""Characters of a path that the gateway accepts."""

ALIASES: Mapping[str, str] = {
    "/v1/score": "/score",
    "/v1/rerank": "/rerank",
    "/v2/rerank": "/rerank",
    "/embeddings": "/v1/embeddings",
    "/v1/classify": "/classify",
}
"""Paths with the same handler as another path, which is measured."""
LEFT_OUT = frozenset(
    {
        "/invocations",  # hands its body to other routes
        "/v1/responses/{response_id}/cancel",  # these have no body
        "/v1/batches/{batch_id}/cancel",
        "/v1/messages/batches/{batch_id}/cancel",
    }
)
_EMBEDS = ("/v1/embeddings", "/v1/embed", "/v2/embed", "/embed", "/embed_all", "/similarity")
_SCORES = ("/score", "/rerank")
MODELS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(_EMBEDS, ("encoder",)),
    **dict.fromkeys(_SCORES, ("encoder", "reranker", "chat")),
    **dict.fromkeys(("/classify", "/predict"), ("reranker",)),
    **dict.fromkeys(("/pooling",), ("encoder", "reranker")),
    "/embed_sparse": ("encoder", "reranker"),
}
"""Models for the routes that pool. Other routes are for the chat model."""


@dataclass(frozen=True, slots=True)
class Part:
    """A field at its limits."""

    what: str
    name: str
    make: Make


@dataclass(frozen=True, slots=True)
class Attack:
    """A request for a route."""

    path: str
    what: str
    body: bytes = b""
    method: str = "POST"
    content_type: str = "application/json"
    route: str = ""
    """The path in the format of DECISIONS."""
    base: Json | None = None
    parts: tuple[Part, ...] = ()
    """What a JSON body consists of; none for other bodies."""

    def without_parts(self) -> Attack:
        """Return the request alone, which can be sent to other processes. The functions of parts cannot."""
        return replace(self, base=None, parts=())


SIZES: Mapping[str, tuple[str, Make]] = {
    "one long text": ("string", lambda: "a" * BYTES),
    "a text of a million characters": ("string", lambda: "a" * TEXT),
    "a million characters of words": ("string", lambda: "to be or " * (TEXT // 9)),
    "escapes": ("string", lambda: "\u00e9\n" * (TEXT // 2)),
    "numbers": ("array", lambda: [1] * VALUES),
    "lists of numbers": ("array", lambda: [[1] * 100] * (VALUES // 101)),
    "2048 lists of numbers": ("array", lambda: [[1] * (VALUES // 2048 - 1)] * 2048),
    "empty objects": ("array", lambda: [{}] * OBJECTS),
    "texts": ("array", lambda: ["a"] * VALUES),
    "keys": ("object", lambda: {str(number): 1 for number in range(VALUES // 5)}),
    "nested lists": ("array", lambda: _nested(190)),
    "nested objects": ("object", lambda: {"a": _nested(190)}),
    "long numbers": ("array", lambda: [int("9" * 390)] * 70_000),
    **{f"{count} texts of words": ("array", lambda count=count: _texts(count)) for count in (30, *COUNTS)},
    **{f"{count} short texts": ("array", lambda count=count: ["a"] * count) for count in COUNTS},
}
"""Values at the limits, with their types in JSON schemas."""


def _texts(count: int) -> list[str]:
    return ["to be or " * min(TEXT // 9, BYTES // 9 // count)] * count


def _nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def routes(openapi: Json) -> tuple[list[str], list[str]]:
    """Return the paths that take a JSON body, and those for GET and DELETE, of all routes for clients."""
    clients = [path for path in openapi["paths"] if _access(path) is Access.CLIENT and path not in ALIASES]
    with_body = [path for path in clients if _schema(openapi, path) is not None]
    others = [path for path in clients if {"get", "delete"} & openapi["paths"][path].keys()]
    return with_body, others


def _access(path: str) -> Access | None:
    return next((own for each, own in DECISIONS.items() if re.sub(r":path\}", "}", each) == path), None)


def _schema(openapi: Json, path: str) -> Json | None:
    content = openapi["paths"][path].get("post", {}).get("requestBody", {}).get("content", {})
    found: Json | None = content.get("application/json", {}).get("schema")
    return found


def attacks(openapi: Json, path: str, rng: random.Random, most: int) -> Iterator[Attack]:
    """Yield at most `most` requests at the limits for a path, each of them with one field at its limit."""
    if (schema := _schema(openapi, path)) is not None:
        made: list[tuple[Json, Part]] = []
        # A body may also be a list, which has no fields.
        for form in (form for form in _forms(schema, openapi) if form.get("type", "object") == "object"):
            base = _least(form, openapi)
            for name, field in form.get("properties", {}).items():
                made += [(base, Part(what, name, make)) for what, make in _largest(field, openapi)]
            made += [(base, Part(what, "unknown", make)) for what, (_, make) in SIZES.items()]
        for base, part in rng.sample(made, min(most, len(made))):
            yield from _attack(path, {**base, "model": rng.choice(MODELS.get(path, ("chat",)))}, (part,))
    elif path == "/v1/files":
        yield from _uploads()
    if {"get", "delete"} & openapi["paths"][path].keys():
        yield from _without_body(path)


def combined(worst: Sequence[Attack]) -> Iterator[Attack]:
    """Yield requests with two fields at their limits, from requests with one."""
    for index, one in enumerate(worst):
        for other in worst[:index]:
            names = [part.name for part in (*one.parts, *other.parts)]
            if one.base is not None and other.base is not None and len(names) == len({*names}) and names:
                yield from _attack(one.route, {**other.base, **one.base}, (*one.parts, *other.parts))


def _attack(path: str, base: Json, parts: tuple[Part, ...]) -> Iterator[Attack]:
    """Yield the request with these parts, unless it is larger than a body may be."""
    body = json.dumps({**base, **{part.name: part.make() for part in parts}}).encode()
    if len(body) <= 32 * MIB:
        what = ", ".join(f"{part.name}: {part.what}" for part in parts)
        if len(MODELS.get(path, ())) > 1:
            what += f" ({base['model']})"
        yield Attack(re.sub("{.*?}", "x", path), what, body, route=path, base=base, parts=parts)


def _uploads() -> Iterator[Attack]:
    """Yield uploads: with a large file, with lines of a batch, and with many fields."""
    line = json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a" * 1000}})
    files = {"zeros": bytes(BYTES), "lines": f"{line}\n".encode() * (BYTES // (len(line) + 1))}
    mark = "----------------part"
    head = f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    named = f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    kind = f"multipart/form-data; boundary={mark}"
    one = Attack("/v1/files", "", content_type=kind, route="/v1/files")
    for what, content in files.items():
        body = f"{head}{named}".encode() + content + f"\r\n--{mark}--\r\n".encode()
        yield replace(one, what=f"file: {what}", body=body)
    fields = "".join(
        f'--{mark}\r\nContent-Disposition: form-data; name="f{number}"\r\n\r\na\r\n' for number in range(900)
    )
    yield replace(one, what="900 fields", body=f"{fields}{named}a\r\n--{mark}--\r\n".encode())


def _without_body(path: str) -> Iterator[Attack]:
    """Yield requests for GET with the longest names, and with the largest and oddest numbers in the query."""
    names = ["a" * LONGEST_PATH, "%2e%2e%2f" * (LONGEST_PATH // 9), "a/" * (LONGEST_PATH // 2)]
    paths = [re.sub("{.*?}", name, path) for name in names] if "{" in path else [path]
    queries = ["", "?limit=100&order=asc", "?limit=" + "9" * 4000, "?after=" + "a" * LONGEST_PATH, "?" + "a&" * 5000]
    for number, each in enumerate(paths):
        for query in queries if number == 0 and len(each) < LONGEST_PATH else queries[:1]:
            what = f"GET {names[number][:6]}… " if "{" in path else "GET "
            yield Attack(each + query, f"{what}{query[:20]}", method="GET", route=path)


def _forms(schema: Json, openapi: Json) -> Iterator[Json]:
    """Yield the forms that a value may have."""
    if "$ref" in schema:
        yield from _forms(openapi["components"]["schemas"][schema["$ref"].rpartition("/")[2]], openapi)
    elif found := schema.get("anyOf") or schema.get("oneOf"):
        for each in found:
            yield from _forms(each, openapi)
    else:
        yield schema


def _least(schema: Json, openapi: Json) -> Any:
    """Return a small value that fits a schema."""
    form = next(_forms(schema, openapi))
    if "const" in form or "enum" in form:
        return form.get("const", form.get("enum", [None])[0])
    match form.get("type"):
        case "object":
            required = form.get("required", ())
            return {name: _least(form["properties"][name], openapi) for name in required if name in form["properties"]}
        case "array":
            return [_least(form["items"], openapi)] if form.get("items") else []
        case "string":
            return "user"
        case "boolean":
            return True
        case "integer" | "number":
            return form.get("minimum", 1)
    return "user"


def _largest(schema: Json, openapi: Json) -> Iterator[tuple[str, Make]]:
    """Yield values at the limits that have a type that a schema allows."""
    for form in _forms(schema, openapi):
        kind = form.get("type", "object")
        yield from ((what, make) for what, (own, make) in SIZES.items() if own == kind)
        if isinstance(items := form.get("items"), dict):
            for each in _forms(items, openapi):
                least = _least(each, openapi)
                text = json.dumps(least)
                cost = text.count("{") + text.count("[")
                for most in (*COUNTS, OBJECTS // cost if cost else VALUES):
                    yield f"{most} times {text[:40]}", lambda least=least, most=most: [least] * most
