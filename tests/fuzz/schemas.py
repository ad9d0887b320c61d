"""Random schemas, and random answers under their grammars: a walk that ends where no token is possible is a fault.

    python -m tests.fuzz.schemas --tokenizer FOLDER/tokenizer.json --schemas 2000 --seeds 5

Each walk takes random tokens of a real tokenizer that the mask allows, and prefers to end. Then its text is checked: it
is JSON that fits the schema in all keywords that are enforced.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from paceline.core.errors import ConstraintError
from paceline.core.grammar import LIMITS, OPTIONS, grammar_of, unenforced
from paceline.core.types import ConstraintKind

Schema = dict[str, Any]
_NAMES = ["a", "b", "x-a", "x-b", "ключ", "a/b", ""]
_PATTERNS = ["^a$", "^x-", "^[a-z]{1,3}$", "b$", "^(a|b)$", r"^\d+$", ".", "^.{2,4}$", "^(?!x).*$", "é|a"]
_VALUES = ["a", "ab", "x-a", 1, 2, -3, 0.5, None, True, False, ["a"], {"a": 1}, "é", ""]
_TOKENS = 400
_CLOSING = 60
"""Tokens after which a walk takes the shortest tokens that close something."""


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """Return a schema whose keywords may contradict each other."""
    kinds = ["string", "integer", "number", "enum", "const"]
    kinds += ["object"] * 4 + ["array", "untyped", "anyOf", "oneOf", "allOf", "not", "if", "ref"] if depth > 0 else []
    match rng.choice(kinds):
        case "string":
            return {"type": "string", **_some(rng, _string(rng))}
        case "integer" | "number" as kind:
            return {"type": kind, **_some(rng, _number(rng))}
        case "enum":
            return {"enum": rng.sample(_VALUES, rng.randint(1, 4)), **_some(rng, {**_string(rng), **_number(rng)}, 0.1)}
        case "const":
            return {"const": rng.choice(_VALUES)}
        case "object":
            return {"type": "object", **_some(rng, _object(rng, depth))}
        case "array":
            return {"type": "array", **_some(rng, _array(rng, depth))}
        case "untyped":
            every = {**_string(rng), **_number(rng), **_object(rng, depth), **_array(rng, depth)}
            return _some(rng, every, 0.12)
        case "not":
            return {**random_schema(rng, depth - 1), "not": random_schema(rng, 0)}
        case "if":
            parts = {name: random_schema(rng, depth - 1) for name in ("if", "then", "else")}
            return {**random_schema(rng, depth - 1), **parts}
        case "ref":
            return {"$ref": "#", **(_some(rng, _object(rng, depth)) if rng.random() < 0.3 else {})}
        case name:
            ways = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
            return {name: ways, **(random_schema(rng, depth - 1) if rng.random() < 0.3 else {})}


def _some(rng: random.Random, schema: Schema, share: float = 0.4) -> Schema:
    return {name: value for name, value in schema.items() if rng.random() < share}


def _string(rng: random.Random) -> Schema:
    formats = ["date", "uuid", "ipv4", "email", "path", "time"]
    return {
        "minLength": rng.randint(0, 5),
        "maxLength": rng.randint(0, 8),
        "pattern": rng.choice(_PATTERNS),
        **({"format": rng.choice(formats)} if rng.random() < 0.3 else {}),
    }


def _number(rng: random.Random) -> Schema:
    return {
        "minimum": rng.randint(-20, 20),
        "maximum": rng.randint(-10, 40),
        "exclusiveMinimum": rng.choice([-1.5, 0, 3]),
        "exclusiveMaximum": rng.choice([0.001, 7, 100]),
        "multipleOf": rng.choice([1, 3, 7, 0.25, 10]),
    }


def _object(rng: random.Random, depth: int) -> Schema:
    inner = depth - 1
    return {
        "properties": {name: random_schema(rng, inner) for name in rng.sample(_NAMES, rng.randint(0, 4))},
        "required": rng.sample(_NAMES, rng.randint(0, 2)),
        "patternProperties": {each: random_schema(rng, inner) for each in rng.sample(_PATTERNS, rng.randint(1, 3))},
        "additionalProperties": rng.choice([True, False, random_schema(rng, 0)]),
        "minProperties": rng.randint(0, 3),
        "maxProperties": rng.randint(0, 4),
        "propertyNames": rng.choice([{"enum": ["a", "b"]}, {"pattern": "^[a-z]+$"}, {"maxLength": 3}]),
        "dependentRequired": {rng.choice(_NAMES): [rng.choice(_NAMES)]},
    }


def _array(rng: random.Random, depth: int) -> Schema:
    inner = depth - 1
    return {
        "items": rng.choice([False, random_schema(rng, inner)]),
        "prefixItems": [random_schema(rng, inner) for _ in range(rng.randint(0, 2))],
        "minItems": rng.randint(0, 3),
        "maxItems": rng.randint(0, 4),
        "contains": random_schema(rng, 0),
        "uniqueItems": True,
    }


class Walker:
    """Walks of random tokens through grammars."""

    def __init__(self, tokenizer: Path) -> None:
        self._texts = Tokenizer.from_file(str(tokenizer))
        self._end = self._texts.token_to_id("<|im_end|>")
        self._library = LLTokenizer(str(tokenizer), eos_token=self._end)
        texts = (
            self._texts.decode([token], skip_special_tokens=False) for token in range(self._texts.get_vocab_size())
        )
        self._closes = np.array([len(text) + 9 * (text[:1] not in ("}", "]", '"', "0")) for text in texts])

    def complaint(self, schema: Schema, seed: int) -> str:
        """Return what is wrong with one walk under a schema, or ""."""
        text = json.dumps({**schema, OPTIONS: {"whitespace_flexible": False}}, ensure_ascii=False)
        try:
            grammar = grammar_of(ConstraintKind.JSON_SCHEMA, text)
        except ConstraintError:
            return ""
        rng = np.random.default_rng(seed)
        matcher = LLMatcher(self._library, grammar, log_level=0, limits=LIMITS)
        tokens: list[int] = []
        while len(tokens) < _TOKENS:
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if matcher.is_error():
                written = self._texts.decode(tokens, skip_special_tokens=False)
                return "" if "too" in matcher.get_error() else f"dead end after {written!r}"
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if self._end in allowed and (len(allowed) == 1 or rng.random() < 0.7):
                break
            allowed = allowed[allowed != self._end]
            if len(tokens) > _CLOSING:
                allowed = allowed[np.argsort(self._closes[allowed], kind="stable")[:3]]
            token = int(rng.choice(allowed))
            matcher.consume_token(token)
            tokens.append(token)
        else:
            return ""  # a schema may have long answers alone
        return _misfit(schema, text, self._texts.decode(tokens, skip_special_tokens=False))


def _misfit(schema: Schema, text: str, answer: str) -> str:
    try:
        value = json.loads(answer)
    except ValueError as error:
        return f"no JSON: {error} in {answer!r}"
    if unenforced(ConstraintKind.JSON_SCHEMA, text):
        return ""
    try:
        # The validator's patterns are Python's, whose "$" also matches before a newline at the end.
        strict = json.loads(json.dumps(schema).replace('$"', r'\\Z"'))
        jsonschema.Draft202012Validator(strict).validate(value)
    except jsonschema.ValidationError as error:
        return f"{error.message} in {answer!r}"
    except Exception:
        return ""  # the validator's own recursion
    return ""


def complaints(tokenizer: Path, schemas: int, seeds: int, first: int = 0) -> Iterator[str]:
    """Yield what is wrong with walks under random schemas, with the schema and its seed."""
    walker = Walker(tokenizer)
    for number in range(first, first + schemas):
        schema = random_schema(random.Random(number))
        for seed in range(seeds):
            if wrong := walker.complaint(schema, seed):
                yield f"schema {number}, seed {seed}: {wrong} under {json.dumps(schema, ensure_ascii=False)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.schemas", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of a model")
    parser.add_argument("--schemas", type=int, default=2000, help="number of schemas")
    parser.add_argument("--seeds", type=int, default=5, help="walks for each schema")
    parser.add_argument("--first", type=int, default=0, help="number of the first schema")
    args = parser.parse_args()
    count = 0
    for found in complaints(args.tokenizer, args.schemas, args.seeds, args.first):
        print(found, flush=True)
        count += 1
    print(f"{args.schemas} schemas, {args.seeds} walks each: {count} wrong")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
