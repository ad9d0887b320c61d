"""Damage valid adapters at random, and check that each is refused with a sentence or loaded as it is written.

    python -m tests.fuzz.adapters --seconds 60 --seed 1

Settings, headers and bytes are damaged. The exit code is 1 if an adapter is loaded with other numbers than the library
safetensors reads, if the reading fails with another error than a refusal, or if it takes more CPU time or memory than
an adapter may take.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from paceline.core.adapters import AdapterFiles
from paceline.core.errors import ModelError
from paceline.kernels.adapters import AdapterKernels
from paceline.kernels.reference import ReferenceKernels
from paceline.models.adapters.base_weights import BaseWeights
from paceline.models.adapters.linears import NamedLinear, NamedLinears
from paceline.models.adapters.loading import AdapterRules, LoadedAdapter, load_adapter

MOST_CPU_SECONDS = 30.0
"""Longest CPU time for one adapter. Expressions may take the most of it."""
MOST_GROWTH_BYTES = 512 << 20
"""Largest growth of the process's memory. The largest header becomes objects of this size."""
MOST_SENTENCE = 1000
_SIZE = 8
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3.5, 2**31, 2**63, 10**40, 1e308, -1e300, float("nan"), float("inf")),
    *("", "x", "q_proj", "all-linear", ".*", "(a+)+$", r"(.*)*\.(q|o)_proj", "(" * 500, "a{1,65535}", r"\1", "\ud800"),
    *([], [1], ["q_proj"], ["q_proj", 5], [[]], [2**70], {}, {"q_proj": 2}, {"(a+)+": 1}, {".*": -1}, [None] * 5000),
)
_KEYS = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("layers_to_transform", "layers_pattern", "lora_bias", "bias", "use_dora", "modules_to_save", "init_lora_weights"),
    *("target_parameters", "trainable_token_indices", "peft_type", "fan_in_fan_out", "new_idea", "lora_dropout"),
)
_PIECES = (
    "a",
    "q_proj",
    "o_proj",
    ".",
    r"\.",
    "|",
    "(",
    ")",
    "*",
    "+",
    "?",
    "{2,9}",
    "[^a]",
    "(?=",
    "(?!",
    "^",
    "$",
    ".*",
)


class ZeroLayer:
    """A linear layer whose matrix is zero."""

    adapters = None
    bias = None
    dtype = torch.float32

    def __init__(self, size_out: int) -> None:
        self._size_out = size_out

    def products(self, rows: Tensor, kernels: AdapterKernels) -> Tensor:
        return torch.zeros(len(rows), self._size_out)


def layers() -> list[NamedLinear]:
    """Return the layers of a small model."""
    noted = NamedLinears()
    for layer in range(2):
        begin = f"model.layers.{layer}.self_attn"
        noted.note(f"{begin}.q_proj", [ZeroLayer(4), ZeroLayer(2)], _SIZE, (4, 2), [5, 4, 3, 2, 1, 0])
        noted.note(f"{begin}.o_proj", [ZeroLayer(_SIZE)], 6, [_SIZE])
    return noted.layers


class Damage:
    """Makes valid adapters, and damages them."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def files(self) -> AdapterFiles:
        """Return the files of an adapter, damaged in some ways."""
        rng = self._rng
        config, tensors = self._valid()
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            config[rng.choice(_KEYS)] = self._value()
        text = json.dumps(config).encode()
        content = safetensors.torch.save(tensors)
        if rng.random() < 0.5:
            content = self._with_header(content)
        return AdapterFiles(self._bytes(text) if rng.random() < 0.2 else text, bytearray(self._bytes(content)))

    def _valid(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        rng, rank = self._rng, self._rng.choice((1, 2, 5))
        dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16))
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj"]}
        tensors = {}
        for layer in range(2):
            for name, size_in, out in (("q_proj", _SIZE, 6), ("o_proj", 6, _SIZE)):
                begin = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                tensors[f"{begin}.lora_A.weight"] = torch.randn(rank, size_in, dtype=dtype)
                tensors[f"{begin}.lora_B.weight"] = torch.randn(out, rank, dtype=dtype)
        return config, tensors

    def _value(self) -> Any:
        if self._rng.random() < 0.4:
            return "".join(self._rng.choices(_PIECES, k=self._rng.randint(1, 40)))
        return self._rng.choice(_VALUES)

    def _with_header(self, content: bytes) -> bytes:
        """Damage what a header says."""
        rng = self._rng
        (length,) = struct.unpack("<Q", content[:8])
        entries = list(json.loads(content[8 : 8 + length]).items())
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(entries))
            key, entry = entries[place]
            if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
                continue
            match rng.randrange(7):
                case 0:
                    entries.append((key, entry))
                case 1:
                    del entries[place]
                case 2:
                    entries[place] = (key.replace("q_proj", rng.choice(("x", "o_proj", "\ud800", "q" * 999))), entry)
                case 3:
                    entries[place] = (
                        key,
                        rng.choice((self._value(), {**entry, "dtype": rng.choice(("F64", "U8", 5))})),
                    )
                case 4:
                    entries[place] = (
                        key,
                        {**entry, "shape": rng.choice(([], [0], [2**40, 2**40], entry["shape"][::-1]))},
                    )
                case 5:
                    ends = [each + rng.choice((-4, 0, 4, 2**62)) for each in entry["data_offsets"]]
                    entries[place] = (key, {**entry, "data_offsets": ends})
                case _:
                    other = rng.choice(entries)[1]
                    entries[place] = (key, {**entry, **(other if isinstance(other, dict) else {})})
            entries = entries or [(key, entry)]
        header = "{" + ",".join(f"{json.dumps(key)}:{json.dumps(entry)}" for key, entry in entries) + "}"
        return struct.pack("<Q", len(header)) + header.encode() + content[8 + length :]

    def _bytes(self, content: bytes) -> bytes:
        """Change, add or remove a few bytes."""
        rng, changed = self._rng, bytearray(content)
        if rng.random() < 0.5:
            return content
        for _ in range(rng.randint(1, 4)):
            if changed:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        if rng.random() < 0.3:
            del changed[rng.randrange(len(changed)) :]
        return bytes(changed + bytes(rng.choice((0, 0, 1, 8))))


def check(files: AdapterFiles) -> str:
    """Load an adapter, and return "loaded" or "refused". Raises AssertionError if neither is right."""
    begin = time.process_time()
    try:
        adapter = load_adapter(
            files, layers(), torch.float32, AdapterRules(most_rank=4), BaseWeights(ReferenceKernels())
        )
    except ModelError as error:
        sentence = str(error)
        assert sentence.encode(), "a refusal without a sentence"
        assert len(sentence) < MOST_SENTENCE, f"a refusal of {len(sentence)} characters"
        adapter = None
    assert time.process_time() - begin < MOST_CPU_SECONDS, "it took too long"
    if adapter is None:
        return "refused"
    _compare(adapter, safetensors.torch.load(bytes(files.tensors)))
    return "loaded"


def _compare(adapter: LoadedAdapter, tensors: dict[str, Tensor]) -> None:
    """Raise AssertionError if a part is not that of the file."""
    used = 0
    for part, named in zip(adapter.parts, layers()):
        own = [tensors.get(f"{begin}{named.name}.lora_{which}.weight") for begin in _BEGINNINGS for which in "AB"]
        found = [tensor for tensor in own if tensor is not None]
        if part is None:
            assert not found, f"{named.name} is left out"
            continue
        down, up = found
        assert torch.equal(part.down, down.float())
        assert torch.equal(part.up, up.float()[list(named.outputs)].T)
        assert part.is_finite
        used += 2 if named.outputs[0] in (0, 5) else 0
    assert used == len(tensors), "tensors of the file are not used"


_BEGINNINGS = ("base_model.model.", "")


def run(seconds: float, seed: int) -> Counter[str]:
    """Check damaged adapters for some seconds. Return how many were loaded and refused. Raises AssertionError."""
    make, outcomes = Damage(seed).files, Counter[str]()
    torch.manual_seed(seed)
    until, before = time.monotonic() + seconds, _memory()
    while time.monotonic() < until or not outcomes:
        own = make()
        try:
            outcomes[check(own)] += 1
        except Exception:
            print(
                f"after {outcomes.total()} adapters: {own.config!r:.2000}\n{bytes(own.tensors[:4000])!r}",
                file=sys.stderr,
            )
            raise
        assert _memory() - before < MOST_GROWTH_BYTES, "reading adapters takes too much memory"
    return outcomes


def _memory() -> int:
    """Return the largest memory that the process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(dict(run(options.seconds, options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
