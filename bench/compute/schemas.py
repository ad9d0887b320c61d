"""Compile random schemas, and compute masks along answers, beside llguidance's own reading of the same schemas.

    python -m bench.compute.schemas --tokenizer ~/.cache/paceline/smollm2-135m-instruct/tokenizer.json

The two take turns for each schema, so that other work on the machine affects both. Ratios are medians over schemas.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer, grammar_from

from bench.serving.load import table
from bench.serving.structured import random_schema
from paceline.core.grammar import LIMITS
from paceline.core.json_grammar.compiler import SchemaOptions, compile_schema

_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
_TOKENS = 200


def ours(schema: dict[str, object]) -> str:
    """Return the grammar of Paceline."""
    return compile_schema(schema, SchemaOptions(white_space=_SPACE)).grammar


def theirs(schema: dict[str, object]) -> str:
    """Return the grammar with which the library reads the schema itself."""
    return grammar_from("json_schema", json.dumps({**schema, "x-guidance": {"whitespace_pattern": _SPACE}}))


def compile_seconds(
    read: Callable[[dict[str, object]], str], schema: dict[str, object], tokenizer: LLTokenizer
) -> float:
    """Return the time until the first mask."""
    began = time.perf_counter()
    LLMatcher(tokenizer, read(schema), log_level=0, limits=LIMITS).compute_bitmask()
    return time.perf_counter() - began


def mask_seconds(grammar: str, tokenizer: LLTokenizer, seed: int) -> float:
    """Return the time of a mask, over an answer of random tokens."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    rng, spent, count = np.random.default_rng(seed), 0.0, 0
    while count < _TOKENS and not matcher.is_stopped():
        began = time.perf_counter()
        mask = matcher.compute_bitmask()
        spent += time.perf_counter() - began
        count += 1
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))
        matcher.consume_token(int(rng.choice(allowed)))
    return spent / max(1, count)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compute.schemas", description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of a model")
    parser.add_argument("--count", type=int, default=200, help="number of schemas")
    parser.add_argument("--seed", type=int, default=1, help="seed of the schemas")
    args = parser.parse_args()
    tokenizer, rng = LLTokenizer(str(args.tokenizer)), random.Random(args.seed)
    figures: dict[str, list[tuple[float, float]]] = {"compile": [], "mask": []}
    for seed in range(args.count):
        schema = random_schema(rng)
        ways = (ours, theirs) if seed % 2 else (theirs, ours)
        spent = {read: compile_seconds(read, schema, tokenizer) for read in ways}
        figures["compile"].append((spent[ours], spent[theirs]))
        spent = {read: mask_seconds(read(schema), tokenizer, seed) for read in ways}
        figures["mask"].append((spent[ours], spent[theirs]))
    rows = []
    for name, pairs in figures.items():
        our_time, other = (statistics.median(each) * 1e6 for each in zip(*pairs))
        ratio = statistics.median(one / two for one, two in pairs)
        rows.append([name, f"{our_time:.0f}", f"{other:.0f}", f"{ratio:.2f}"])
    print(table(["median of", "ours, µs", "llguidance's, µs", "ratio"], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
