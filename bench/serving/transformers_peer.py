"""Run one stream of transformers and print its times.

    python -m bench.serving.transformers_peer FOLDER [--dtype float32] [--threads 2]

`ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2` in the environment narrow torch to AVX2.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from paceline.models.gguf.file import read_whole


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving.transformers_peer", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("model", help="model folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # The matrices of a converted folder are in a GGUF file, from where transformers would not read them.
    config, tensors = AutoConfig.from_pretrained(options.model), read_whole(Path(options.model))
    dtype = getattr(torch, options.dtype)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=tensors, dtype=dtype
    )

    def seconds(prompt: int, tokens: int) -> float:
        def once() -> float:
            ids = torch.randint(1000, 30_000, (1, prompt))
            began = time.perf_counter()
            model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
            return time.perf_counter() - began

        return statistics.median(once() for _ in range(options.rounds))

    print(f"first token after 128 tokens: {seconds(128, 1) * 1e3:.0f} ms, after 1,600: {seconds(1600, 1) * 1e3:.0f} ms")
    print(f"128 tokens after 128: {128 / seconds(128, 128):.1f} tokens/s")


if __name__ == "__main__":
    main()
