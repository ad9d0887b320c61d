"""Try tiny random checkpoints of many architectures in the engine, and compare their tokens with those of transformers.

    python -m bench.compute.architectures --out docs/architectures.md    # all; writes the table
    python -m bench.compute.architectures olmo2 gpt2                     # some; prints the table

Each checkpoint is loaded with `--model-impl auto` in fp32 and generates greedily in several ways. In each, every token
must be the best one of `transformers` after the tokens before it. If one is not, the command ends with status 1.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core import env

env.share_cores()

import torch  # noqa: E402
import transformers  # noqa: E402

from bench.compute.tiny_architectures import FAMILIES, save_tiny  # noqa: E402
from paceline.core.context import Context  # noqa: E402
from paceline.core.errors import PacelineError  # noqa: E402
from paceline.core.speculative import SpeculativeConfig  # noqa: E402
from paceline.core.types import Key, SamplingParams  # noqa: E402
from paceline.engine.engine import Engine  # noqa: E402
from paceline.engine.limits import Limits  # noqa: E402
from paceline.engine.loading import Loaded, load  # noqa: E402
from paceline.engine.request import Request  # noqa: E402
from paceline.engine.scheduler import Scheduler  # noqa: E402
from paceline.engine.speculation import Speculation  # noqa: E402
from paceline.engine.step import Event, Sampled  # noqa: E402
from paceline.kernels import select_kernels  # noqa: E402
from paceline.models.identity import implementation_name  # noqa: E402

CPU = torch.device("cpu")
MAX_LEN = 512
TOKENS = 24
PROMPTS = (
    [(7 * place * place + 3) % 97 + 3 for place in range(75)],
    [(5 * place + 11) % 97 + 3 for place in range(60)],
)
REPEATING = [[*range(10, 30)] * 4]
_NGRAM = SpeculativeConfig("ngram", num_speculative_tokens=4, adaptive=False)
_PATIENCE = 60
"""Seconds without an event after which a run fails."""


class Way(NamedTuple):
    """A way to cut the same computation."""

    name: str
    chunk: int
    """Tokens of one step, of all requests together."""
    prompts: Sequence[list[int]] = PROMPTS
    drafts: bool = False
    reuses: bool = False
    """Whether the requests begin with the blocks of earlier requests with the same prompts."""


WAYS = (
    Way("one request", MAX_LEN, PROMPTS[:1]),
    Way("two requests in chunks of 5", 5),
    Way("two requests in chunks of 32", 32),
    Way("prompt lookup", MAX_LEN, REPEATING, drafts=True),
    Way("reused prefixes", 32, reuses=True),
)


class Outcome(NamedTuple):
    architecture: str
    code: str
    result: str
    is_wrong: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compute.architectures", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("families", nargs="*", default=FAMILIES, help="model types; default: all of the table")
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--device", type=torch.device, default=CPU, help="cpu or cuda [%(default)s]")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the models are so small that threads would only wait for each other
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    outcomes = []
    for family in options.families:
        outcomes.append(outcome := try_family(family, options.device))
        print(" | ".join(outcome[:3]), flush=True)
    if options.out:
        options.out.write_text(page(outcomes))
    if wrong := [outcome.architecture for outcome in outcomes if outcome.is_wrong]:
        sys.exit(f"wrong tokens: {', '.join(wrong)}")


def try_family(family: str, device: torch.device = CPU) -> Outcome:
    """Generate tokens on a device with a tiny model of a family in all ways."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = save_tiny(family, folder)
        architecture = type(reference).__name__
        code = implementation_name(folder, "auto").partition(" ")[0]
        try:
            plain = load(folder, torch.float32, device, select_kernels(device), None)
        except PacelineError as error:
            return Outcome(architecture, code, f"refused: {_reason(str(error), folder, architecture)}")
        refused, differing = [], []
        for way in WAYS:
            try:
                loaded = load(folder, torch.float32, device, select_kernels(device), _NGRAM) if way.drafts else plain
            except PacelineError:
                refused.append(way.name)
                continue
            if not _is_right(reference, way, generate(loaded, way, device)):
                differing.append(way.name)
    if differing:
        return Outcome(architecture, code, f"**other tokens**: {', '.join(differing)}", is_wrong=True)
    return Outcome(architecture, code, f"same tokens; refused: {', '.join(refused)}" if refused else "same tokens")


def generate(loaded: Loaded, way: Way, device: torch.device = CPU) -> list[list[int]]:
    """Return the output tokens of each prompt of a way."""
    slots, blocks = itertools.count(), [group.blocks_for(MAX_LEN) for group in loaded.layout.groups]
    tables = [[[next(slots) for _ in range(count)] for count in blocks] for _ in way.prompts]
    pool = torch.zeros(next(slots) * loaded.layout.slot_bytes // 4, device=device)
    outputs: list[list[int]] = []
    for reused in (False, True) if way.reuses else (False,):
        limits = Limits(way.chunk, MAX_LEN, len(way.prompts), loaded.max_drafts)
        events: queue.SimpleQueue[list[Event] | BaseException] = queue.SimpleQueue()
        scheduler = Scheduler(limits, Speculation(loaded.max_drafts, adaptive=False))
        engine = Engine(scheduler, loaded.runner(pool, limits), events.put, events.put)
        engine.start()
        for index, (prompt, block_tables) in enumerate(zip(way.prompts, tables)):
            filled = len(prompt) // loaded.layout.alignment * loaded.layout.alignment if reused else 0
            sampling = SamplingParams(max_tokens=TOKENS)
            key, copied = Key(str(index), 1, 1), [[*table] for table in block_tables]
            engine.add(Request(key, Context(prompt), len(prompt), sampling, loaded.layout, copied, filled))
        outputs = _collect(events, len(way.prompts))
        engine.stop()
    return outputs


def _collect(events: queue.SimpleQueue[list[Event] | BaseException], requests: int) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in range(requests)]
    while any(len(tokens) < TOKENS for tokens in outputs):
        happened = events.get(timeout=_PATIENCE)
        if isinstance(happened, BaseException):
            raise happened
        for event in happened:
            if isinstance(event, Sampled):
                outputs[int(event.key.request_id)].append(event.token.id)
    return outputs


def _is_right(reference: Any, way: Way, outputs: Sequence[list[int]]) -> bool:
    """Return whether each token is the best one of `transformers` after the tokens before it."""
    for prompt, tokens in zip(way.prompts, outputs):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        if logits.argmax(dim=-1).tolist() != tokens:
            return False
    return True


def _reason(told: str, folder: Path, architecture: str) -> str:
    """Return an error's text without the folder and the architecture, which the table already names."""
    for known in (f"{folder / 'config.json'}: ", f"{folder}: ", f"{architecture} cannot run: ", f"{architecture} "):
        told = told.removeprefix(known)
    return told.replace("|", "\\|")


def page(outcomes: Iterable[Outcome]) -> str:
    """Return the page with the table, in Markdown."""
    rows = "".join(f"| {architecture} | {code} | {result} |\n" for architecture, code, result, _ in outcomes)
    return f"""# Architectures

<!-- Written by python -m bench.compute.architectures --out docs/architectures.md -->

`--model-impl auto` computes a model with native code if there is some for its architecture, and else with the model's
own code in the package `transformers` ([models and kernels](design/models-and-kernels.md#models-without-a-file-here)).
The table shows the result for tiny random checkpoints in fp32, with transformers {transformers.__version__}. "Same
tokens" means that all greedy tokens are those of `transformers`, in each of these ways:
{", ".join(way.name for way in WAYS)}.

Causal models that are not in the table load in the same way. If a model does something that cannot be served, it is
refused by name when it is loaded. `LlavaForConditionalGeneration` runs in `transformers`, too, images included.

| architecture | code | result |
| --- | --- | --- |
{rows}"""


if __name__ == "__main__":
    main()
