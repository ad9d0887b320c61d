"""Compare the types of keys and values in the KV cache: blocks that fit, decoding, and errors of logits.

    python -m bench.compute.kv_cache ~/.cache/paceline/smollm2-135m-instruct --text README.md --text CONTRIBUTING.md

Errors are those of the logits of all tokens of a text, beside the logits with the type of --dtype: the root of their
mean square, divided by that of the logits; the divergence of the probabilities (KL, in nats a token); the share of
tokens whose most likely next token is another one; and the perplexity of the text. Decoding is that of the engine alone
with filled blocks, as in bench.compute.scaling; all types take turns, and figures are the best of all rounds. Processor
time is of all threads together. Bytes of a token are those of its blocks, which are also the bytes of a handoff.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paceline.core import env

env.share_cores()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.compute.forward import arena_memory, make_batch  # noqa: E402
from bench.compute.loop import Run, machine  # noqa: E402
from bench.compute.scaling import measure  # noqa: E402
from bench.serving.load import new_file, table  # noqa: E402
from paceline.core.kv_layout import KVLayout, make_layout  # noqa: E402
from paceline.engine.loading import Loaded, load  # noqa: E402
from paceline.engine.runner import layer_caches  # noqa: E402
from paceline.kernels import select_kernels  # noqa: E402
from paceline.kernels.batch import AttentionBatch  # noqa: E402
from paceline.kernels.codes import CODES  # noqa: E402
from paceline.kernels.interface import ForwardInputs  # noqa: E402

CPU, CHUNK = torch.device("cpu"), 512
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Error:
    """Errors of the logits of a text beside those of other keys and values."""

    relative: float
    divergence: float
    """Mean KL divergence of the probabilities of a token, in nats."""
    changed: float
    """Share of tokens with another most likely next token."""
    perplexity: float


def layouts(loaded: Loaded) -> dict[str, KVLayout]:
    """Return the layout of each type of keys and values."""
    shapes, itemsize = loaded.model.group_shapes, loaded.layout.itemsize
    made = {AUTO: make_layout(shapes, itemsize, "")}
    return made | {name: make_layout(tuple(shape.coded(name) for shape in shapes), itemsize, "") for name in CODES}


def logits_of(loaded: Loaded, layout: KVLayout, tokens: Tensor) -> Iterator[Tensor]:
    """Yield the logits of the tokens of one context, fp32 [tokens, vocab], chunk by chunk."""
    pool = arena_memory(layout.slots_for(len(tokens)) * layout.slot_bytes)
    caches = layer_caches(layout, pool.view(torch.bfloat16 if layout.itemsize == 2 else torch.float32))
    whole = make_batch(layout, 1, len(tokens), len(tokens))
    with torch.inference_mode():
        for begin in range(0, len(tokens), CHUNK):
            part = tokens[begin : begin + CHUNK]
            end = begin + len(part)
            batch = chunk_of(whole, begin, end)
            inputs = ForwardInputs(part, torch.arange(begin, end), caches, batch)
            yield loaded.model.logits(loaded.model.forward(inputs)).values


def chunk_of(whole: AttentionBatch, begin: int, end: int) -> AttentionBatch:
    """Return the batch of tokens [begin, end) of the one context of a batch that computes it as a whole."""
    groups = tuple(
        replace(group, write_slots=group.write_slots[begin:end], write_offsets=group.write_offsets[begin:end])
        for group in whole.groups
    )
    return AttentionBatch((0, end - begin), (end,), groups)


def error_of(loaded: Loaded, exact: KVLayout, other: KVLayout, tokens: Tensor) -> Error:
    """Return the errors of the logits with one layout beside those with another."""
    squares, total, divergence, changed, loss = 0.0, 0.0, 0.0, 0, 0.0
    pairs = zip(logits_of(loaded, exact, tokens), logits_of(loaded, other, tokens))
    for index, (wanted, found) in enumerate(pairs):
        squares += float((found - wanted).double().square().sum())
        total += float(wanted.double().square().sum())
        before, after = F.log_softmax(wanted, -1), F.log_softmax(found, -1)
        divergence += float(F.kl_div(after, before, reduction="sum", log_target=True))
        changed += int((wanted.argmax(-1) != found.argmax(-1)).sum())
        following = tokens[index * CHUNK + 1 : index * CHUNK + 1 + len(found)]
        loss += float(F.nll_loss(after[: len(following)], following, reduction="sum"))
    count = len(tokens)
    perplexity = math.exp(loss / (count - 1))
    return Error(math.sqrt(squares / total), divergence / count, changed / count, perplexity)


def read_tokens(loaded: Loaded, folder: Path, texts: Sequence[Path], most: int) -> Tensor:
    """Return the first tokens of the texts, as many as --text-tokens and the model's longest context allow."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("\n\n".join(path.read_text() for path in texts)).ids
    return torch.tensor(ids[: min(most, loaded.max_position)])


def decode(
    loaded: Loaded, made: dict[str, KVLayout], context: int, batch: int, tokens: int, rounds: int
) -> dict[str, list[Run]]:
    """Return the runs of each type, one for each round."""
    found: dict[str, list[Run]] = {name: [] for name in made}
    for number in range(rounds):
        for name, layout in made.items():
            run = measure(replace(loaded, layout=layout), context, batch, tokens)
            found[name].append(run)
            print(f"round {number + 1}: {name}: {run.tokens_per_second:.1f} tokens/s", file=sys.stderr)
    return found


def show(made: dict[str, KVLayout], found: dict[str, list[Run]], errors: dict[str, Error]) -> str:
    """Return a table with a line for each type."""
    fastest, cheapest = (
        {name: max((run.tokens_per_second for run in runs), default=math.nan) for name, runs in found.items()},
        {name: min((run.cpu_ms for run in runs), default=math.nan) for name, runs in found.items()},
    )
    lines = []
    for name, layout in made.items():
        fit = made[AUTO].token_bytes / layout.token_bytes
        line = [name, f"{layout.token_bytes:.0f}", f"{fit:.2f}", f"{1 / fit:.3f}"]
        line += [f"{fastest[name]:.1f}", f"{fastest[name] / fastest[AUTO]:.2f}"]
        line += [f"{cheapest[name]:.2f}", f"{cheapest[AUTO] / cheapest[name]:.2f}"]
        if name in errors:
            error = errors[name]
            line += [
                f"{error.relative:.4f}",
                f"{error.divergence:.2e}",
                f"{error.changed:.2%}",
                f"{error.perplexity:.3f}",
            ]
        lines.append([*line, *["-"] * (12 - len(line))])
    header = ["type", "bytes a token", "blocks", "handoff", "tokens/s", "ratio"]
    header += ["processor ms a token", "ratio"]
    return table([*header, "error of logits", "KL", "other token", "perplexity"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compute.kv_cache", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="[%(default)s]")
    parser.add_argument("--kernels", default="auto", help="kernels to compute with [%(default)s]")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each context [%(default)s]")
    parser.add_argument("--batch", type=int, default=8, help="requests that decode at once [%(default)s]")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that each request decodes [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of decoding; 0 for none [%(default)s]")
    parser.add_argument("--text", type=Path, action="append", default=[], help="text for errors; may be repeated")
    parser.add_argument("--text-tokens", type=int, default=4096, help="most tokens of the text [%(default)s]")
    parser.add_argument("--out", type=new_file, help="JSON file for all figures")
    args = parser.parse_args()
    loaded = load(args.model, getattr(torch, args.dtype), CPU, select_kernels(CPU, args.kernels), None)
    if not 2 <= args.tokens < args.context <= loaded.max_position:
        parser.error(f"--tokens must be at least 2 and less than --context, which is at most {loaded.max_position}")
    made = layouts(loaded)
    errors: dict[str, Error] = {}
    if args.text:
        tokens = read_tokens(loaded, args.model, args.text, args.text_tokens)
        errors = {name: error_of(loaded, made[AUTO], layout, tokens) for name, layout in made.items()}
    found = decode(loaded, made, args.context, args.batch, args.tokens, args.rounds)
    print(show(made, found, errors))
    if args.out:
        each = {
            name: {
                "token_bytes": layout.token_bytes,
                "tokens_per_second": [run.tokens_per_second for run in found[name]],
                "cpu_ms_a_token": [run.cpu_ms for run in found[name]],
                **(asdict(errors[name]) if name in errors else {}),
            }
            for name, layout in made.items()
        }
        args.out.write_text(json.dumps({"machine": machine(CPU), "figures": each}, indent=2) + "\n")


if __name__ == "__main__":
    main()
