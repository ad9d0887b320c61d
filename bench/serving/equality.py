"""Check that tokens do not depend on how the stack runs: send the same requests to differently configured stacks.

    python -m bench.serving.equality smollm2-135m-instruct --dtype float32 --requests 200

The ways are synchronous and asynchronous scheduling, each without drafts and with each drafter. Each stack serves the
requests one at a time, and then eight at a time. All outcomes must equal those of the first run. The draft model is a
checkpoint made of the first third of the model's layers.

With --thinking the requests are chats whose reasoning has a budget, and each answer must also think for exactly as many
tokens as its budget leaves. The stacks hand all sequences over, and have so little memory that they preempt some.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from safetensors.torch import save_file

from bench.common.mixed import Outcome, answers, requests
from bench.common.services import serving
from bench.common.systems import ending_on_sigterm
from bench.serving.load import table
from bench.serving.thinking import OPTIONS, add_markers, complaints, thinking_requests
from paceline.core.env import default_cache_dir
from paceline.models.files.gguf_reference import REFERENCE_FILE
from paceline.models.gguf.file import read_whole
from paceline.models.sources.assets import resolve_model
from paceline.services.gateway.planning.tokenizer import Tokenizer


def ways(draft_folder: Path, layers: int) -> dict[str, tuple[str, ...]]:
    """Return the options of each stack by its name. The others are compared with the first one."""
    drafters = {
        "no drafts": {},
        "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "adaptive": False},
        "early layers": {
            "method": "early_layers",
            "num_layers": layers,
            "num_speculative_tokens": 3,
            "adaptive": False,
        },
        "draft model": {"model": str(draft_folder), "num_speculative_tokens": 3, "adaptive": False},
    }
    return {
        f"{mode}, {name}": (f"--{flag}", f"--speculative-config={json.dumps(config) if config else ''}")
        for mode, flag in (("synchronous", "no-async-scheduling"), ("asynchronous", "async-scheduling"))
        for name, config in drafters.items()
    }


def shorten(folder: Path, layers: int, target: Path) -> None:
    """Write a checkpoint with the first `layers` layers of another one."""
    weights = shutil.ignore_patterns("*.safetensors*", "*.gguf", REFERENCE_FILE)
    shutil.copytree(folder, target, ignore=weights, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (target / "config.json").write_text(json.dumps(config))
    kept = {name: tensor for name, tensor in read_whole(folder).items() if _layer(name) < layers}
    save_file(kept, target / "model.safetensors")


def _layer(name: str) -> int:
    """Return the layer that a tensor belongs to, or -1 if it belongs to none."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving.equality", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="bundled name, Hugging Face folder or GGUF file")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of weights and activations [%(default)s]",
    )
    parser.add_argument("--requests", type=int, default=200, help="requests of the measurement [%(default)s]")
    parser.add_argument(
        "--concurrency", type=int, action="append", help="requests at a time; may be repeated; default: 1 and 8"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of everything that is random [%(default)s]")
    parser.add_argument(
        "--way", action="append", help="compare only this cut of the stack with the first one; may be repeated"
    )
    parser.add_argument(
        "--thinking",
        choices=("text", "tokens"),
        help="send chats with budgets of reasoning, whose markers are plain text or tokens of their own",
    )
    args = parser.parse_args()
    ending_on_sigterm()
    folder = resolve_model(args.model, default_cache_dir(), lambda text: print(text, file=sys.stderr))
    config = json.loads((folder / "config.json").read_text())
    third = max(1, config["num_hidden_layers"] // 3)
    name = folder.name
    wanted: list[Outcome] = []
    rows, differences = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        if args.thinking == "tokens":
            add_markers(folder, Path(scratch, name))
            folder = Path(scratch, name)
        if args.thinking:
            asked, tokenizer = thinking_requests(args.requests, args.seed), Tokenizer(folder)
        else:
            asked, tokenizer = requests(args.requests, args.seed, config["vocab_size"]), None
        shorten(folder, third, Path(scratch))
        known = ways(Path(scratch), third)
        if unknown := set(args.way or ()) - set(known):
            parser.error(f"no way {unknown.pop()!r}; there are {', '.join(map(repr, known))}")
        first = next(iter(known))
        for way, options in known.items():
            if args.way and way not in (first, *args.way):
                continue
            options = (f"--served-model-name={name}", f"--dtype={args.dtype}", *options)
            options += OPTIONS if args.thinking else ()
            with serving(Path(scratch, "log"), str(folder), *options) as (_, url):
                for concurrency in args.concurrency or [1, 8]:
                    began = time.perf_counter()
                    found = asyncio.run(answers(url, name, asked, concurrency))
                    seconds = time.perf_counter() - began
                    wanted = wanted or found
                    wrong = [text for one, other in zip(wanted, found) if (text := one.difference(other))]
                    wrong += complaints(asked, found, tokenizer) if tokenizer is not None else []
                    differences += len(wrong)
                    tokens = sum(len(outcome.tokens) for outcome in found)
                    rows.append([way, str(concurrency), str(tokens), f"{tokens / seconds:.0f}", str(len(wrong))])
                    print(*rows[-1], *wrong[:2], sep=" | ", file=sys.stderr, flush=True)
    print(table(["way", "at a time", "tokens", "tok/s", "differ"], rows))
    return 1 if differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
