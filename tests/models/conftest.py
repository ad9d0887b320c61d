from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.kv_layout import make_layout
from paceline.engine.runner import layer_caches
from paceline.kernels.batch import AttentionBatch, GroupTables
from paceline.kernels.interface import ForwardInputs, Taps
from paceline.models.base import EncodedRows, Model

TRIMMED = 2**31 - 1
"""Table entry for blocks that must not be read. As an index it raises."""


class PagedContexts:
    """Contexts of several requests in a pool of NaN with shuffled slots, and the model's steps over them.

    Blocks that a window has left are filled with NaN and removed from the table, as when the engine gives them back.
    """

    def __init__(self, model: Model, requests: int, max_tokens: int, dtype: torch.dtype = torch.float32) -> None:
        layout = make_layout(model.group_shapes, dtype.itemsize, "test")
        self._model = model
        self._slots = iter(torch.randperm(requests * layout.slots_for(max_tokens)).tolist())
        slot_elements = layout.slot_bytes // dtype.itemsize
        pool_elements = requests * layout.slots_for(max_tokens) * slot_elements
        self._pool = torch.full((pool_elements,), float("nan"), dtype=dtype)
        self._by_slot = self._pool.view(-1, slot_elements)
        self._groups = layout.groups
        self._tables = [
            torch.full((requests, group.blocks_for(max_tokens)), TRIMMED, dtype=torch.int32) for group in layout.groups
        ]
        self._caches = layer_caches(layout, self._pool)
        self._lengths = [0] * requests
        self.adapters: dict[int, int] = {}
        """Slots of the adapters of requests; other requests have none."""

    def step(
        self,
        tokens: dict[int, list[int]],
        taps: Taps | None = None,
        wanted: dict[int, int] | None = None,
        image: tuple[int, Tensor] | None = None,
    ) -> dict[int, Tensor]:
        """Append tokens to some requests. Return the logits of each, fp32 [new tokens, vocab].

        With `wanted`, only the logits of the last wanted[request] tokens are computed. `image` is the start of a span
        in request 0, and its encoding.
        """
        starts, positions = [0], []
        for request, new in tokens.items():
            positions.append(torch.arange(self._lengths[request], self._lengths[request] + len(new)))
            self._lengths[request] += len(new)
            starts.append(starts[-1] + len(new))
        contexts = tuple(self._lengths[request] for request in tokens)
        groups = tuple(self._group_tables(index, list(tokens), positions) for index, _ in enumerate(self._groups))
        encoded, last_keys = None, None
        if image is not None:
            owners = torch.tensor([request for request, new in tokens.items() for _ in new])
            encoded, last_keys = _read_image(owners, torch.cat(positions), *image)
        adapters = torch.tensor([self.adapters.get(request, -1) for request, new in tokens.items() for _ in new])
        batch = AttentionBatch(
            tuple(starts), contexts, groups, last_keys=last_keys, adapters=adapters if self.adapters else None
        )
        flat = torch.tensor([token for new in tokens.values() for token in new])
        with torch.inference_mode():
            counts = None if wanted is None else [wanted[request] for request in tokens]
            inputs = ForwardInputs(flat, torch.cat(positions), self._caches, batch, taps=taps)
            hidden = self._model.forward(inputs, counts, encoded)
            rows = [len(new) for new in tokens.values()] if counts is None else counts
            slots = torch.tensor([self.adapters.get(request, -1) for request in tokens])
            own = slots.repeat_interleave(torch.tensor(rows)) if self.adapters else None
            logits = self._model.logits(hidden, own).values
        self._trim()
        parts = torch.split(logits, rows)
        return dict(zip(tokens, parts))

    def _group_tables(self, index: int, requests: list[int], positions: list[Tensor]) -> GroupTables:
        group, table = self._groups[index], self._tables[index]
        for request, own in zip(requests, positions):
            for block in range(int(own[0]) // group.block_tokens, int(own[-1]) // group.block_tokens + 1):
                if table[request, block] == TRIMMED:
                    table[request, block] = next(self._slots)
        slots = [table[request, own // group.block_tokens] for request, own in zip(requests, positions)]
        places = torch.cat(positions) % group.block_tokens
        return GroupTables(group.block_tokens, group.shape.window, table[requests], torch.cat(slots).long(), places)

    def _trim(self) -> None:
        for group, table in zip(self._groups, self._tables):
            for request, length in enumerate(self._lengths):
                for block in range(group.first_needed_block(length)):
                    if table[request, block] != TRIMMED:
                        self._by_slot[table[request, block]] = float("nan")
                        table[request, block] = TRIMMED


def _read_image(
    owners: Tensor, positions: Tensor, start: int, rows: Tensor
) -> tuple[EncodedRows | None, Tensor | None]:
    """Return the rows that tokens of request 0 read, and the last key that each token sees."""
    inside = (owners == 0) & (positions >= start) & (positions < start + len(rows))
    if not inside.any():
        return None, None
    encoded = EncodedRows(inside.nonzero().flatten(), rows[positions[inside] - start])
    return encoded, torch.where(inside, start + len(rows) - 1, positions)


@pytest.fixture(scope="session")
def paged_contexts() -> type[PagedContexts]:
    return PagedContexts


@pytest.fixture(scope="session")
def encoder_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A function that returns a tiny model with encoders and its `transformers` model, by a key of `WRITERS`."""
    from tests.models.encoder_cases import WRITERS  # imports transformers, which other tests do without

    known: dict[str, tuple[Path, Any]] = {}

    def write(kind: str) -> tuple[Path, Any]:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            known[kind] = folder, WRITERS[kind](folder)
        return known[kind]

    return write


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Set the number of torch's threads, of which packing takes as many."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
