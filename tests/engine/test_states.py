"""Hidden states as results: those of transformers, whatever else is computed and however a prompt is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from paceline.core.context import Context
from paceline.core.types import Key, SamplingParams
from paceline.engine.request import Request
from tests.engine.loops import Loop, load
from tests.tiny_checkpoints import write_tiny

LENGTHS = (1, 2, 15, 16, 17, 33, 50, 90, 120)
CLOSE = 2e-5
BIDIRECTIONAL = {"use_bidirectional_attention": True, "sliding_window": 14}


def prompts(seed: int = 1) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(3, 100) for _ in range(length)] for length in LENGTHS]


def request(
    loop: Loop, name: str, tokens: list[int], states: Literal["none", "last", "all"] = "all", **more: Any
) -> Request:
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    own = {"tables": loop.tables(), **more}
    return Request(Key(name, 1, 1), Context(tokens), len(tokens), sampling, loop.layout, states=states, **own)


def computed(loop: Loop, asked: list[list[int]], states: Literal["last", "all"] = "all") -> list[torch.Tensor]:
    """Return the states of prompts that are computed together."""
    found = []
    for first in range(0, len(asked), 4):  # the pool has room for eight requests
        found += loop.states(
            [request(loop, str(first + i), tokens, states) for i, tokens in enumerate(asked[first : first + 4])]
        )
        loop.refill()
    loop.engine.stop()
    return found


@pytest.mark.parametrize(
    ("family", "head", "changes"),
    [
        ("qwen3", "ForCausalLM", {"tie_word_embeddings": True}),
        ("qwen3", "Model", {}),
        ("qwen3", "ForSequenceClassification", {}),
        ("llama", "ForTokenClassification", {}),
        ("mistral", "Model", {}),
        ("gemma3", "Model", BIDIRECTIONAL),
        ("gemma3", "ForSequenceClassification", BIDIRECTIONAL),
    ],
)
def test_states_are_those_of_transformers_in_any_batch_and_chunks(
    tmp_path: Path, family: str, head: str, changes: dict[str, object]
) -> None:
    reference = write_tiny(tmp_path, family, head=head, **changes).eval()
    decoder = reference.model if hasattr(reference, "model") else reference
    model, asked = load(tmp_path), prompts()
    alone = [computed(Loop(model, 1, "none", budget=256), [tokens])[0] for tokens in asked]
    for tokens, found in zip(asked, alone):
        with torch.no_grad():
            wanted = decoder(torch.tensor([tokens])).last_hidden_state[0]
        assert (found - wanted).abs().max() < CLOSE
    for budget in (24, 64):
        together = computed(Loop(model, 2, "none", budget=budget), asked)
        assert all(torch.equal(*pair) for pair in zip(alone, together))
    last = computed(Loop(model, 2, "none"), asked, "last")
    assert all(torch.equal(whole[-1:], found) for whole, found in zip(alone, last))


def test_requests_for_states_and_for_tokens_share_steps(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    model, asked = load(tmp_path), prompts()[4:8]
    alone = [computed(Loop(model, 1, "none"), [tokens])[0] for tokens in asked]
    loop = Loop(model, 2, "lookup")
    others = [request(loop, f"other {index}", tokens, "none") for index, tokens in enumerate(prompts(2)[3:6])]
    found = loop.states([request(loop, str(index), tokens) for index, tokens in enumerate(asked)], others)
    loop.engine.stop()
    assert all(torch.equal(*pair) for pair in zip(alone, found))
    assert [len(other.token_ids) - other.prompt_len for other in others] == [8, 8, 8]


def test_a_cached_prefix_changes_no_bit(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    loop = Loop(load(tmp_path), 2, "none")
    tokens = prompts()[7]
    first = request(loop, "first", tokens)
    whole = loop.states([first])[0]
    assert [hashed for event in loop.sealed for hashed in event.hashes]
    shared = [[*table] for table in first.tables]
    found = loop.states([request(loop, "again", tokens, tables=shared, computed_len=64)])[0]
    last = loop.states([request(loop, "last", tokens, "last", tables=shared, computed_len=80)])[0]
    loop.engine.stop()
    assert torch.equal(whole[64:], found)
    assert torch.equal(whole[-1:], last)


def test_blocks_whose_tokens_see_later_ones_are_not_sealed(tmp_path: Path) -> None:
    write_tiny(tmp_path, "gemma3", head="Model", **BIDIRECTIONAL)
    loop = Loop(load(tmp_path), 2, "none")
    loop.states([request(loop, "first", prompts()[7])])
    loop.engine.stop()
    assert not loop.sealed


def test_a_context_of_the_largest_length_is_computed(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    loop = Loop(load(tmp_path), 2, "none")
    found = loop.states([request(loop, "longest", [5] * 256, "last")])[0]
    loop.engine.stop()
    assert found.shape[0] == 1
