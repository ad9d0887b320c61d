"""What rounding a model's matrices costs: perplexity, greedy tokens that differ from bf16, and memory while loading.

    python -m bench.compute.formats ~/.cache/paceline/smollm2-135m-instruct [--format mxfp4] [--out FILE]

The text is of this file, so no model has been trained on it. Perplexity is that of its tokens. Then bf16 continues the
text greedily from several places, and "the same tokens" are the share of these tokens that a format chooses, too, after
the same context. Each format is loaded once more in a process of its own, for the memory at the end and at the peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.compute.forward import CPU, DTYPE
from bench.serving.load import table
from paceline.core.kv_layout import make_layout
from paceline.core.machine import give_back_large_memory
from paceline.core.online_quantization import ONLINE_FORMATS
from paceline.engine.runner import layer_caches
from paceline.kernels import select_kernels
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.interface import ForwardInputs
from paceline.models.base import Model
from paceline.models.loader import load_model
from paceline.services.gateway.planning.tokenizer import Tokenizer

FORMATS = ("none", *ONLINE_FORMATS)
CONTINUED = 32
"""Number of tokens of each greedy continuation."""
TEXT = """\
The harbour at Kestrel Point freezes only once in a generation, and when it does the whole town walks out onto the ice.
Old Marta, who had kept the ferry for forty years, remembered the last time. She had been nine, and her father had tied
a rope around her waist before he let her go, so that the tide, if it woke under them, would not take her far. Now she
stood on the pier with her own rope coiled over one shoulder and looked for somebody to tie it to.

The engineers had come from the city the week before. They drilled holes, lowered thermometers, and wrote numbers in
small blue notebooks. Fourteen centimetres near the wall, they said, but only six where the river comes in. Six
centimetres will carry a person, and perhaps a dog, but not a horse and not a crowd. So they set out a row of red flags
and asked the mayor to keep everybody on the near side of them. The mayor promised it. By noon the flags were in the
hands of children, who had found that they made excellent sails.

What nobody had expected was the sound. Ice is never silent. It creaks as it grows, and it sings when the water beneath
it rises or falls, a long falling note like a wire that is struck far away. The fishermen, who had laughed at the
engineers, grew quiet when they heard it. They knew wood and rope and iron, and each of these gives a warning before it
breaks. They did not know what kind of warning this was.

Marta did. She walked down the steps, put one boot on the ice and then the other, and went along the line where the
flags had been. At every place where a flag was missing she set down one of the empty crab pots that her sons had
stacked by the boathouse. It took her most of an hour. When she had finished, there was a fence of wicker from the
wall to the breakwater, and people stopped at it without being told, because a crab pot is a thing that belongs to
somebody, while a flag belongs to nobody at all.
"""


class Contexts:
    """The logits of a model for one context at a time.

    Args:
        most: number of tokens of the longest context.
    """

    def __init__(self, model: Model, most: int) -> None:
        self._model = model
        layout = make_layout(model.group_shapes, DTYPE.itemsize, "bench")
        slots = layout.slots_for(most)
        self._caches = layer_caches(layout, torch.zeros(slots * layout.slot_bytes // DTYPE.itemsize, dtype=DTYPE))
        self._groups = layout.groups
        counts = [group.blocks_for(most) for group in layout.groups]
        self._tables = [part[None].int() for part in torch.split(torch.arange(sum(counts)), counts)]

    def logits(self, tokens: list[int], known: int = 0) -> Tensor:
        """Return the logits after each token that is not known yet: fp32 [tokens, vocab].

        Args:
            known: number of the first tokens that the last call had, too.
        """
        positions = torch.arange(known, len(tokens))
        groups = []
        for group, blocks in zip(self._groups, self._tables):
            slots = blocks[0, positions // group.block_tokens].long()
            places = positions % group.block_tokens
            groups.append(GroupTables(group.block_tokens, group.shape.window, blocks, slots, places))
        batch = AttentionBatch((0, len(positions)), (len(tokens),), tuple(groups))
        inputs = ForwardInputs(torch.tensor(tokens[known:]), positions, self._caches, batch)
        with torch.inference_mode():
            return self._model.logits(self._model.forward(inputs)).values.clone()

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """Return a context with `count` further tokens."""
        known = 0
        for _ in range(count):
            logits = self.logits(tokens, known)
            tokens, known = [*tokens, int(logits[-1].argmax())], len(tokens)
        return tokens


def perplexity(logits: Tensor, tokens: list[int]) -> float:
    """Return the perplexity of tokens, given logits [tokens, vocab] after each of them."""
    return float(cross_entropy(logits[:-1], torch.tensor(tokens[1:])).exp())


def same_tokens(logits: Tensor, tokens: list[int], count: int) -> int:
    """Return how many of the last `count` tokens are those with the largest logits [tokens, vocab] before them."""
    return int((logits[-count - 1 : -1].argmax(1) == torch.tensor(tokens[-count:])).sum())


def load(folder: Path, name: str) -> Model:
    return load_model(folder, DTYPE, select_kernels(CPU), CPU, quantization=name)  # type: ignore[arg-type]


def load_memory(folder: Path, name: str) -> dict[str, int]:
    """Return the resident bytes of a process that loads a model: before, at the end ("final") and at the peak."""
    command = [sys.executable, "-m", "bench.compute.formats", str(folder), "--load", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def show_load(folder: Path, name: str) -> None:
    give_back_large_memory()
    kernels = select_kernels(CPU)
    before = _status()["VmRSS"]
    model = load_model(folder, DTYPE, kernels, CPU, quantization=name)  # type: ignore[arg-type]
    after = _status()
    print(json.dumps({"before": before, "final": after["VmRSS"], "peak": after["VmHWM"]}))
    del model


def _status() -> dict[str, int]:
    """Return the sizes of this process that Linux tells, in bytes."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def measure(folder: Path, names: list[str], starts: int) -> list[dict[str, float | str]]:
    """Return the figures of each format. The first one must be "none"."""
    tokens = Tokenizer(folder).encode(TEXT, True)
    contexts: list[list[int]] = []
    rows: list[dict[str, float | str]] = []
    for name in names:
        model = Contexts(load(folder, name), len(tokens) + CONTINUED)
        if not contexts:
            step = len(tokens) // (starts + 1)
            contexts = [model.greedy(tokens[: step * (place + 1)], CONTINUED) for place in range(starts)]
        same = sum(same_tokens(model.logits(context), context, CONTINUED) for context in contexts)
        row: dict[str, float | str] = {"format": name, "perplexity": perplexity(model.logits(tokens), tokens)}
        row["same tokens"] = same / (CONTINUED * len(contexts))
        del model
        rows.append({**row, **load_memory(folder, name)})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--format", action="append", choices=ONLINE_FORMATS, help="a format [all]")
    parser.add_argument("--starts", type=int, default=8, help="number of greedy continuations [%(default)s]")
    parser.add_argument("--out", type=Path, help="file for all figures, in JSON")
    parser.add_argument("--load", choices=FORMATS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        show_load(options.model, options.load)
        return
    rows = measure(options.model, ["none", *(options.format or ONLINE_FORMATS)], options.starts)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2))
    first = float(rows[0]["perplexity"])
    print(
        table(
            ("format", "perplexity", "ratio", "same tokens", "MiB before", "loaded", "peak", "peak / loaded"),
            [
                (
                    str(row["format"]),
                    f"{row['perplexity']:.3f}",
                    f"{float(row['perplexity']) / first:.3f}",
                    f"{float(row['same tokens']):.1%}",
                    *(f"{float(row[name]) / 2**20:.0f}" for name in ("before", "final", "peak")),
                    f"{float(row['peak']) / float(row['final']):.2f}",
                )
                for row in rows
            ],
        )
    )


if __name__ == "__main__":
    main()
