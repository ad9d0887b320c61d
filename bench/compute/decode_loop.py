"""Measure the decode loop alone on a real model: the gain of running ahead and of drafts, and equality of tokens.

    python -m bench.compute.decode_loop ~/.cache/paceline/smollm2-135m-instruct --batch 1 --batch 8 --rounds 3

Each round runs every way in turn on the same requests; the table has medians. "bubble" is the share of the time in
which the compute thread was idle although there was work, measured by the loop itself. With --profile the profiler
py-spy samples the process from outside, and "idle" is the share of samples in which the compute thread computed
nothing. Tokens are compared with those of the first way.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path

from paceline.core import env

env.share_cores()

import tokenizers  # noqa: E402
import torch  # noqa: E402

from bench.compute.loop import Run, print_header, print_rows, run, summary  # noqa: E402
from bench.compute.profiler import idle_share, profiled  # noqa: E402
from paceline.core.speculative import parse_speculative_config  # noqa: E402
from paceline.core.types import SamplingParams  # noqa: E402
from paceline.engine.loading import load  # noqa: E402
from paceline.kernels import select_kernels  # noqa: E402

NGRAM = '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'
WAYS = (
    ("one step, no drafts", 1, ""),
    ("two steps, no drafts", 2, ""),
    ("one step, ngram", 1, NGRAM),
    ("two steps, ngram", 2, NGRAM),
)

_LIST = ", ".join(f"item {number}: {name}" for number, name in enumerate(("apple", "bread", "candle", "drum") * 4))
TEXTS = {
    "copy": f"Repeat this list word for word, again and again.\n{_LIST}\n{_LIST}\n",
    "story": "Once upon a time there was a dragon who wanted to learn how to bake bread.",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="type of weights and activations [%(default)s]",
    )
    parser.add_argument("--batch", type=int, action="append", help="requests that decode together; may be repeated")
    parser.add_argument(
        "--text", choices=sorted(TEXTS), action="append", help="text that is continued; may be repeated"
    )
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the measurement [%(default)s]")
    parser.add_argument("--temperature", type=float, default=0.0, help="temperature; 0 is greedy [%(default)s]")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus of the sampling [%(default)s]")
    parser.add_argument("--profile", action="store_true", help="sample the process with py-spy (must be installed)")
    options = parser.parse_args()
    device, dtype = torch.device("cpu"), getattr(torch, options.dtype)
    sampling = SamplingParams(temperature=options.temperature, top_p=options.top_p)
    kernels = select_kernels(device, "auto")
    ways = {
        name: (steps, load(options.model, dtype, device, kernels, parse_speculative_config(config)))
        for name, steps, config in WAYS
    }
    tokenizer = tokenizers.Tokenizer.from_file(str(options.model / "tokenizer.json"))
    print_header()
    for text in options.text or TEXTS:
        for batch in options.batch or (1, 8):
            prompts = [tokenizer.encode(f"{index}. {TEXTS[text]}").ids for index in range(batch)]
            runs: dict[str, list[Run]] = {name: [] for name in ways}
            for _ in range(options.rounds):
                for name, (steps, loaded) in ways.items():
                    with profiled() if options.profile else contextlib.nullcontext([]) as looks:
                        done = run(loaded, steps, prompts, options.tokens, device, sampling=sampling)
                    runs[name].append(replace(done, idle=idle_share(looks)))
            print_rows(text, batch, summary(runs))


if __name__ == "__main__":
    main()
