"""Run one stream of llama.cpp and print the seconds of each prompt and of a later token, as JSON.

`bench.serving.q4` runs this file in a virtual environment that has llama-cpp-python and not Paceline.
"""

import json
import sys
import time

import llama_cpp

file, prompt_tokens, tokens, rounds, threads = sys.argv[1], *map(int, sys.argv[2:6])
model = llama_cpp.Llama(file, n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)
found = []
for number in range(rounds + 1):
    prompt = [1000 + (number * 7919 + place * 104729) % 30_000 for place in range(prompt_tokens)]
    began = time.perf_counter()
    answer = model.generate(prompt, temp=0.0, reset=True)
    next(answer)
    first = time.perf_counter()
    for _ in range(tokens - 1):
        next(answer)
    found.append({"prompt_seconds": first - began, "token_seconds": (time.perf_counter() - first) / (tokens - 1)})
print(json.dumps(found[1:]))  # the first round is the warm-up
