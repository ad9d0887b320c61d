"""Run several sequences of llama.cpp at a time, with weights in F16, and print their tokens per second.

    VENV/bin/python bench/serving/llama_cpp_batch.py FILE.gguf SEQUENCES [TOKENS] [THREADS]

VENV is a virtual environment that has llama-cpp-python and not Paceline. The weights are first converted to F16. Each
sequence has a prompt of TOKENS random tokens and as many new ones, 128 by default, chosen greedily.
"""

import ctypes
import random
import sys
import tempfile
import time

import llama_cpp
import numpy as np

source, sequences = sys.argv[1], int(sys.argv[2])
tokens, threads = (int(text) for text in [*sys.argv[3:], *("128", "2")[len(sys.argv) - 3 :]])

llama_cpp.llama_backend_init()
with tempfile.TemporaryDirectory() as folder:
    file = f"{folder}/f16.gguf"
    form = llama_cpp.llama_model_quantize_default_params()
    form.ftype, form.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_F16, True
    assert llama_cpp.llama_model_quantize(source.encode(), file.encode(), ctypes.byref(form)) == 0
    model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
options = llama_cpp.llama_context_default_params()
options.n_ctx, options.n_seq_max, options.n_batch = 4096, sequences, 2048
options.n_threads = options.n_threads_batch = threads
context = llama_cpp.llama_init_from_model(model, options)
vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))


def decode(rows: list[tuple[int, int, int, bool]]) -> None:
    """Compute rows of token, position, sequence, and whether its logits are needed."""
    batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (token, position, sequence, is_last) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, is_last
        batch.seq_id[i][0] = sequence
    assert llama_cpp.llama_decode(context, batch) == 0
    llama_cpp.llama_batch_free(batch)


began = time.perf_counter()
for sequence in range(sequences):
    decode([(random.randrange(1000, 30_000), i, sequence, i == tokens - 1) for i in range(tokens)])
prefilled = time.perf_counter()
last = [1000] * sequences
for step in range(tokens):
    decode([(last[sequence], tokens + step, sequence, True) for sequence in range(sequences)])
    rows = (llama_cpp.llama_get_logits_ith(context, sequence) for sequence in range(sequences))
    last = [int(np.ctypeslib.as_array(row, shape=(vocab,)).argmax()) for row in rows]
ended = time.perf_counter()
count = sequences * tokens
print(f"prompts {count / (prefilled - began):.0f} tokens/s, decoding {count / (ended - prefilled):.0f} tokens/s")
print(f"output, with the time of the prompts: {count / (ended - began):.0f} tokens/s")
