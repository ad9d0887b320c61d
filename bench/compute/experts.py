"""A random model with experts for measurements, and the speed of its experts' kernel.

    python -m bench.compute.experts model FOLDER --tokenizer FOLDER [--hidden 1536 --layers 20 --experts 64 --inner 512]
    python -m bench.compute.experts kernel [--rows 1] [--threads 2] [--rounds 20] [--quantization int8]

`model` writes a Qwen 3 MoE in bf16, one layer at a time. By default it has about 3.2 billion parameters, of which a
token uses 0.6 billion. With the tokenizer of another model in its folder, any server can serve it.

`kernel` measures one layer of experts and compares it with reading the weights of the experts in use, at the rate of a
plain loop (see floors.py). Each run goes through as many layers as exceed the CPU caches, with other experts for each
row and run. Times are medians, of CPU time with one thread and of wall time with more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.compute.floors import Floors
from bench.compute.kernels import COPIES_BYTES, QUANTIZE, medians
from paceline.kernels.experts import ExpertWeights
from paceline.kernels.native import NativeKernels

HEAD_DIM, KV_HEADS = 128, 4
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("generation_config.json", "chat_template.jinja"),
)


def write_model(folder: Path, args: argparse.Namespace) -> None:
    """Write config.json, an index and one file of weights for each layer. Prints the numbers of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "intermediate_size": 4 * args.hidden,
        "moe_intermediate_size": args.inner,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_experts": args.experts,
        "num_experts_per_tok": args.top_k,
        "norm_topk_prob": True,
        "max_position_embeddings": 32768,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "eos_token_id": args.vocab - 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shards = [{"model.embed_tokens.weight": (args.vocab, args.hidden), "model.norm.weight": (args.hidden,)}]
    shards += [layer_shapes(layer, args) for layer in range(args.layers)]
    files: dict[str, str] = {}
    for index, shapes in enumerate(shards):
        name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        save_file({key: random_tensor(shape) for key, shape in shapes.items()}, folder / name, {"format": "pt"})
        files.update(dict.fromkeys(shapes, name))
    index_text = json.dumps({"metadata": {}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index_text)
    if args.tokenizer is not None:
        for file in TOKENIZER_FILES:
            if (args.tokenizer / file).is_file():
                shutil.copy(args.tokenizer / file, folder / file)
    total = sum(torch.Size(shape).numel() for shapes in shards for shape in shapes.values())
    expert = 3 * args.inner * args.hidden
    active = total - args.layers * (args.experts - args.top_k) * expert
    print(f"{total / 1e9:.2f} billion parameters, of which a token uses {active / 1e9:.2f} billion")


def layer_shapes(layer: int, args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors, by their names."""
    hidden, inner, queries, keys = args.hidden, args.inner, args.heads * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "mlp.gate.weight": (args.experts, hidden),
    }
    for expert in range(args.experts):
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            shapes[f"mlp.experts.{expert}.{name}_proj.weight"] = shape
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def random_tensor(shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape) * shape[1] ** -0.5).bfloat16()


def random_layer(kernels: NativeKernels, args: argparse.Namespace) -> ExpertWeights:
    quantize: Callable[[Tensor], object] = QUANTIZE.get(args.quantization, lambda weight: weight)

    def matrices(size_out: int, size_in: int) -> list[object]:
        return [kernels.pack(quantize(random_tensor((size_out, size_in)))) for _ in range(args.experts)]

    gate, up = matrices(args.inner, args.hidden), matrices(args.inner, args.hidden)
    return kernels.index_experts(ExpertWeights(gate, up, matrices(args.hidden, args.inner), "silu"))


def measure(args: argparse.Namespace) -> None:
    """Print the time of a layer and its share of the time in which a plain loop reads the weights in use."""
    torch.set_num_threads(args.threads)
    kernels = NativeKernels(args.threads, args.instruction_set)
    layers = [random_layer(kernels, args)]
    first_layer = layers[0]
    bytes_of = [
        sum(part[e].data.nbytes for part in (first_layer.gate, first_layer.up, first_layer.down))
        for e in range(args.experts)
    ]
    # Rows choose experts in turn, so that it is known how many are in use.
    used = min(args.experts, args.rows * args.top_k)
    layers += [random_layer(kernels, args) for _ in range(COPIES_BYTES // (used * bytes_of[0]))]
    x = torch.randn(args.rows, args.hidden).bfloat16()
    weights = torch.full((args.rows, args.top_k), 1 / args.top_k)
    starts = itertools.count(step=args.top_k)

    def run() -> None:
        first = next(starts)
        ids = torch.arange(first, first + args.rows * args.top_k).view(args.rows, -1) % args.experts
        for layer in layers:
            kernels.experts(x, ids, weights, layer)

    read = Floors(kernels.instruction_set, args.threads).rates(args.rounds).read
    (total,) = medians(args.rounds, run)
    seconds, floor = total / len(layers), used * bytes_of[0] / read
    print(
        f"{kernels.instruction_set}, {args.threads} threads, {args.rows} rows: {seconds * 1e6:.0f} us for {used} "
        f"experts of {bytes_of[0] / 1e6:.2f} MB; reading at {read / 1e9:.1f} GB/s takes {floor / seconds:.0%} of it"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compute.experts", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("model", "kernel"))
    parser.add_argument("folder", type=Path, nargs="?", help="where `model` writes")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer files to copy")
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--inner", type=int, default=512, help="inner size of an expert")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quantization", choices=("none", *QUANTIZE), default="none")
    parser.add_argument("--instruction-set", default="auto")
    args = parser.parse_args()
    if args.what == "kernel":
        measure(args)
    elif args.folder is None:
        parser.error("`model` needs a folder")
    else:
        write_model(args.folder, args)


if __name__ == "__main__":
    main()
