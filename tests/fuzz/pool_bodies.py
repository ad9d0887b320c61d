"""Random bodies for the routes that pool, most of them odd, and the reading of their answers. Pure functions."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Answer = Callable[[Any], Sequence[Any]]
"""A function that returns the results in an answer, in the order of the inputs."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route that pools, and where its inputs and results are."""

    path: str
    inputs: tuple[str, ...]
    """Names that lead to the list of inputs in a body."""
    results: Answer
    others: Mapping[str, Any]
    """Fields that each body has besides."""
    options: Mapping[str, Sequence[Any]]
    """Values of further fields that a body may have."""


@dataclass(frozen=True, slots=True)
class OddBody:
    route: Route
    data: bytes
    body: Json | None
    """The body, if it can be divided into its inputs; None if it is too odd for that."""


_TEXTS = [
    "a",
    "b c",
    "c a b",
    "d " * 20,
    "e",
    "a a",
    "x y z",
    "hello",
    "é",
    "日本 a",
    "\U0001f600",
    "  a  ",
    "A",
    "[CLS] a",
]
_ODD_TEXTS = [
    "",
    " ",
    "\n\t",
    "\x00",
    "a\x00b",
    "\ud800",
    "a\udfffb",
    "a" * 500,
    "a " * 3000,
    "<|end|>",
    "[PAD]",
    "\u202e",
]
_ODD_VALUES: Sequence[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, -(2**63) - 1, 10**399, 10**401, 0.5, -0.0, 1e308, "", "x"),
    *("\ud800", [], {}, [[]], [None], {"a": 1}, [1, "a"], ["a", ["b"]], [[1], "a"], [1.5], [True], [-1], [10**9]),
    *([5, 6, 7], [[5, 6], [7]], [[5], []], ["a"] * 2049, [[5]] * 2049, [5] * 9000, {"text": "a"}, [{"text": "a"}]),
]
_SIZES = [0, 1, 2, 8, 31, 32, 33, 64, 65, 384, 10**6, -1]
_COMMON: Mapping[str, Sequence[Any]] = {
    "priority": [0, 5, -(2**31), 2**31],
    "request_id": ["x", "a" * 300, "é\n", ""],
    "user": ["u", 5],
    "cache_salt": ["s", "", "a" * 1025],
    "truncate_prompt_tokens": _SIZES,
    "truncation_side": ["left", "right", "middle"],
    "add_special_tokens": [True, False],
    "use_activation": [True, False],
}
_ENCODING: Mapping[str, Sequence[Any]] = {
    "encoding_format": ["float", "base64", "bytes", "bytes_only", "int8"],
    "embed_dtype": ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "float64"],
    "endianness": ["native", "big", "little"],
    "dimensions": _SIZES,
}
_TEI: Mapping[str, Sequence[Any]] = {
    "truncate": [True, False],
    "truncation_direction": ["Left", "Right", "left"],
    "prompt_name": ["query", "none"],
    "normalize": [True, False],
    "dimensions": _SIZES,
    "raw_scores": [True, False],
}
_COHERE: Mapping[str, Sequence[Any]] = {
    "embedding_types": [["float"], ["int8", "base64"], ["binary", "ubinary", "uint8"], ["float"] * 50, []],
    "input_type": ["search_query", "search_document", "clustering", "none", "image"],
    "truncate": ["NONE", "START", "END", "end"],
    "max_tokens": _SIZES,
    "output_dimension": _SIZES,
    "images": [["data:,"], []],
}
_SCORING: Mapping[str, Sequence[Any]] = {
    **{name: _COMMON[name] for name in ("priority", "request_id", "truncate_prompt_tokens", "use_activation")},
    "max_tokens_per_doc": _SIZES,
    "max_tokens_per_query": _SIZES,
    "instruction": ["rank", ""],
    "top_n": [0, 100],
    "return_documents": [True, False],
    "return_text": [True, False],
    "raw_scores": [True, False],
}


def _listed(name: str) -> Answer:
    return lambda answer: [each[name] for each in answer["data"]]


def _cohere(answer: Any) -> Sequence[Any]:
    found = answer["embeddings"]
    if isinstance(found, list):
        return found
    return [[found[kind][index] for kind in found] for index in range(len(next(iter(found.values()))))]


def _ranked(name: str, place: Callable[[Any], Any]) -> Answer:
    return lambda answer: [each[name] for each in sorted(place(answer), key=lambda each: each["index"])]


_TASKS = "embed", "token_embed", "classify", "token_classify", "score", "sparse", "plugin", "none"
_POOLING = {**_COMMON, **_ENCODING, "task": _TASKS}
_EMBEDDING = {**_COMMON, **_ENCODING, "prompt_name": ["query"]}
_SIMILARITY = {"parameters": [{"truncate": True}, {"prompt_name": "none"}, {}]}
_RESULTS = _ranked("relevance_score", lambda answer: answer["results"])


def _bare(answer: Any) -> Sequence[Any]:
    found: Sequence[Any] = answer
    return found


ROUTES = (
    *(Route(path, ("input",), _listed("embedding"), {}, _EMBEDDING) for path in ("/v1/embeddings", "/embeddings")),
    Route("/pooling", ("input",), _listed("data"), {}, _POOLING),
    *(Route(path, ("input",), _listed("probs"), {}, _COMMON) for path in ("/classify", "/v1/classify")),
    *(Route(path, ("texts",), _cohere, {}, _COHERE) for path in ("/v1/embed", "/v2/embed")),
    *(Route(path, ("inputs",), _bare, {}, _TEI) for path in ("/embed", "/embed_all", "/embed_sparse", "/predict")),
    Route("/similarity", ("inputs", "sentences"), _bare, {"inputs": {"source_sentence": "a b"}}, _SIMILARITY),
    *(Route(path, ("text_2",), _listed("score"), {"text_1": "a b"}, _SCORING) for path in ("/score", "/v1/score")),
    *(
        Route(path, ("documents",), _RESULTS, {"query": "a b"}, _SCORING)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Route("/rerank", ("texts",), _ranked("score", _bare), {"query": "a b"}, {**_SCORING, "truncate": [True, False]}),
)


def random_body(rng: random.Random, models: Sequence[str]) -> OddBody:
    """Return a body for a random route. About a third of the bodies are right.

    Args:
        models: names of the models that the server has.
    """
    route = rng.choice(ROUTES)
    body: Json = copy.deepcopy(dict(route.others))
    body |= {name: rng.choice(values) for name, values in route.options.items() if rng.random() < 0.15}
    if rng.random() < 0.9:
        body["model"] = rng.choice(models)
    texts: list[Any] = [rng.choice(_TEXTS) for _ in range(rng.choice([1, 1, 2, 5, 40]))]
    if route.path == "/predict":
        texts = [[text] for text in texts]
    if "input" in route.inputs and rng.random() < 0.2:
        texts = [[rng.randint(5, 30) for _ in range(rng.choice([1, 3, 70]))] for _ in texts]
    _at(body, route.inputs[:-1])[route.inputs[-1]] = texts
    is_odd = rng.random() < 0.6
    if is_odd:
        _make_odd(rng, route, body, texts)
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.06:
        return OddBody(route, _broken(rng, data), None)
    return OddBody(route, data, body if inputs_of(route, body) else None)


def alone(route: Route, body: Json, index: int) -> Json:
    """Return a body with a single one of its inputs."""
    only = copy.deepcopy(body)
    _at(only, route.inputs[:-1])[route.inputs[-1]] = [inputs_of(route, body)[index]]
    return only


def inputs_of(route: Route, body: Json) -> list[Any]:
    """Return the inputs of a body; none if they are no list of inputs."""
    place = _at(body, route.inputs[:-1])
    found = place.get(route.inputs[-1]) if isinstance(place, dict) else None
    is_list = isinstance(found, list) and bool(found) and not isinstance(found[0], int | float)
    # A list of two texts is one pair for /predict.
    return found if is_list and not (route.path == "/predict" and isinstance(found[0], str)) else []  # type: ignore[return-value]


def _at(body: Any, names: Sequence[str]) -> Any:
    for name in names:
        body = body[name] if isinstance(body, dict) and name in body else {}
    return body


def _make_odd(rng: random.Random, route: Route, body: Json, texts: list[Any]) -> None:
    """Change one or two things of a body. `texts` is the list of inputs in it."""
    for _ in range(rng.choice([1, 1, 2])):
        match rng.randrange(6):
            case 0:
                texts[rng.randrange(len(texts))] = rng.choice(_ODD_TEXTS)
            case 1:
                texts[rng.randrange(len(texts))] = rng.choice(_ODD_VALUES)
            case 2:
                body[rng.choice([*body, *route.options])] = rng.choice(_ODD_VALUES)
            case 3:
                body.pop(rng.choice([*body]), None)
            case 4:
                body[rng.choice(["x", "messages", "normalize", "inputs", "input", "\ud800"])] = rng.choice(_ODD_VALUES)
            case 5:
                _at(body, route.inputs[:-1])[route.inputs[-1]] = rng.choice([*_ODD_VALUES, *_ODD_TEXTS])


def _broken(rng: random.Random, data: bytes) -> bytes:
    """Return a body that is no JSON any more, or JSON in an unusual form."""
    place = rng.randrange(len(data))
    ways: list[Callable[[], bytes]] = [
        lambda: data[:place],
        lambda: data[:place] + rng.randbytes(3) + data[place:],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data + data,
        lambda: data[:-1] + b',"input":"b","input":"c"}',
        lambda: data[:-1] + b',"dimensions":NaN}',
        lambda: data[:-1] + b',"priority":1e999}',
        lambda: data[:-1] + b',"x":' + b"[" * 300 + b"]" * 300 + b"}",
        lambda: b"[" + data + b"]",
        lambda: data.decode("utf-8", "replace").encode("utf-16"),
        lambda: b"",
        lambda: b"null",
    ]
    return rng.choice(ways)()
