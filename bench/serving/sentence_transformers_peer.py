"""Texts per second of sentence-transformers in its own process, without HTTP, at its best size of batches.

    VENV/bin/python -m bench.serving.sentence_transformers_peer FOLDER [--dtype float32] [--threads 2]

VENV is an environment with sentence-transformers; nothing of this project is imported.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from sentence_transformers import SentenceTransformer

TEXT = "the of and in to was is for on as with by he that at from his it an were are which this be had"
WORDS = TEXT.split()
"""The words of bench.serving.pooling."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving.sentence_transformers_peer", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 256])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = SentenceTransformer(
        options.model, device="cpu", local_files_only=True, model_kwargs={"dtype": getattr(torch, options.dtype)}
    )
    for tokens in options.tokens:
        rates = {}
        for batch in options.batches:
            texts = [" ".join(random.choices(WORDS, k=tokens - 2)) for _ in range(4 * batch)]
            model.encode(texts[:batch], batch_size=batch)
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < options.seconds:
                model.encode(texts, batch_size=batch)
                count += len(texts)
            rates[batch] = count / (time.perf_counter() - began)
        best = max(rates, key=rates.__getitem__)
        found = ", ".join(f"{batch}: {rate:.1f}" for batch, rate in rates.items())
        print(f"{tokens} tokens: {rates[best]:.1f} texts/s with {best} a batch ({found})", flush=True)


if __name__ == "__main__":
    main()
