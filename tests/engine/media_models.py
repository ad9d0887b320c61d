"""Tiny models that read images, with the encodings of prompts and the tokens that `transformers` chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.gemma4_unified import modeling_gemma4_unified as unified

from paceline.core.media import MediaKind, MediaSpan
from paceline.kernels import select_kernels
from paceline.models.base import Model
from paceline.models.loader import load_model
from paceline.models.model_config import ModelConfig
from tests.engine.loops import CPU, Media
from tests.tiny_checkpoints import (
    write_gemma3_with_vision,
    write_gemma4_unified,
    write_gemma4_with_media,
    write_llava,
    write_qwen3_5_with_vision,
    write_qwen3_vl,
)

KINDS = ("gemma3", "edge", "experts", "unified", "qwen3_vl", "qwen3_vl_moe", "llava")
"""Gemma 3 looks ahead in all layers, Gemma 4 E2B in none, and Gemma 4 26B and 12B in sliding ones. Qwen 3-VL has
positions with three dimensions, and adds parts of a row in several layers. LLaVA runs in `transformers`."""


@dataclass
class Prompt:
    token_ids: list[int]
    media: Media

    def with_other_images(self) -> Prompt:
        """Return a prompt with the same tokens and other encodings."""
        return Prompt(
            self.token_ids,
            [(replace(span, digest=b"other" + span.digest[5:]), rows.flip(0) + 1) for span, rows in self.media],
        )


@dataclass
class MediaModel:
    model: Model
    reference: Any
    kind: str

    @property
    def row_size(self) -> int:
        """Elements of a row of an encoding."""
        config = self.model.config
        if isinstance(config, ModelConfig):
            return config.encoding_size
        return int(self.reference.config.get_text_config().hidden_size)

    def placeholder(self, kind: MediaKind) -> int:
        config = self.reference.config
        return int({MediaKind.IMAGE: config.image_token_id}.get(kind) or config.video_token_id)

    @property
    def has_grids(self) -> bool:
        return self.kind.startswith("qwen")

    def tower_rows(self, seed: int) -> torch.Tensor:
        """Return the rows of a random image: [length, size]."""
        generator, core = torch.Generator().manual_seed(seed), self.reference.model
        with torch.inference_mode():
            if self.has_grids:
                side = self.reference.config.vision_config.patch_size
                patches = torch.randn(8 * 12, 3 * 2 * side**2, generator=generator)
                found = core.get_image_features(patches, torch.tensor([[1, 8, 12]]), return_dict=True)
                added = getattr(found, "deepstack_features", ())
                return torch.cat([own for (own,) in (found.pooler_output, *added)], dim=1)
            if self.kind == "gemma3":
                pixels = torch.randn(1, 3, 56, 56, generator=generator)
                return core.get_image_features(pixels, return_dict=True).pooler_output[0]
            if self.kind == "llava":
                pixels = torch.randn(1, 3, 28, 28, generator=generator)
                return core.get_image_features(pixels, return_dict=True).pooler_output[0]
            side = 7 if self.kind == "unified" else 18
            grid = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)
            size = 3 * (12 if self.kind == "unified" else 16) ** 2
            pixels = torch.rand(1, side**2, size, generator=generator)
            return core.get_image_features(pixels, grid[None], return_dict=True).pooler_output[0]

    def prompt(self, *parts: int | tuple[MediaKind, torch.Tensor], seed: int = 0) -> Prompt:
        """Return a prompt of text (a number of tokens) and media."""
        generator = torch.Generator().manual_seed(seed)
        tokens: list[int] = []
        media: list[tuple[MediaSpan, torch.Tensor]] = []
        for part in parts:
            if isinstance(part, int):
                tokens += torch.randint(3, 90, (part,), generator=generator).tolist()
                continue
            kind, rows = part
            grid = _grid(len(rows)) if self.has_grids else None
            media.append((MediaSpan(len(tokens), len(rows), bytes([len(media), seed] * 8), kind, grid), rows))
            tokens += [self.placeholder(kind)] * len(rows)
        return Prompt(tokens, media)

    def check(self, prompt: Prompt, output: Sequence[int]) -> None:
        """Check that each token of the output is the best one after the tokens before it."""
        context = torch.tensor([prompt.token_ids + list(output)])
        with torch.inference_mode():
            logits = self.reference(context, use_cache=False, **self.inputs(prompt, context)).logits[0]
        best = logits[len(prompt.token_ids) - 1 : -1].topk(2)
        assert (best.values[:, 0] - best.values[:, 1]).min() > 1e-4, "the best two tokens are too near each other"
        assert best.indices[:, 0].tolist() == list(output)

    def inputs(self, prompt: Prompt, context: torch.Tensor) -> dict[str, Any]:
        """Return what `transformers` takes beside the tokens [1, length] of a prompt and of some output."""
        types = torch.zeros_like(context)
        for span, _ in prompt.media:
            types[0, span.start : span.end] = 1 if span.kind == MediaKind.IMAGE else 2
        if self.kind == "gemma3":
            rows = torch.cat([rows for _, rows in prompt.media])[None]
            return {"token_type_ids": types, "mm_encoder_outputs": {"image": SimpleNamespace(pooler_output=rows)}}
        if self.kind == "llava":
            rows_of_images = SimpleNamespace(pooler_output=[rows for _, rows in prompt.media])
            return {"mm_encoder_outputs": {"image": rows_of_images}}
        if self.has_grids:
            return {"mm_token_type_ids": types, **_qwen3_vl_inputs(prompt)}
        names = {MediaKind.IMAGE: "image", MediaKind.VIDEO_FRAME: "video"}
        outputs = {
            name: SimpleNamespace(pooler_output=[rows for span, rows in prompt.media if span.kind == kind])
            for kind, name in names.items()
            if any(span.kind == kind for span, _ in prompt.media)
        }
        inputs = {"mm_token_type_ids": types, "mm_encoder_outputs": outputs}
        if self.kind == "unified":
            # The forward pass of transformers 5.23 would let tokens look ahead in full layers, too.
            text = self.reference.config.text_config
            shaped = torch.empty(*context.shape, text.hidden_size)
            blocks = unified.get_block_sequence_ids_for_mask(types, context.device)
            inputs["attention_mask"] = unified.create_masks_for_vision_model(text, shaped, None, None, None, blocks)
        return inputs


def _grid(length: int) -> tuple[int, int, int]:
    """Return the grid of this length that is nearest to a square, with at least as many columns as rows."""
    rows = next(rows for rows in range(math.isqrt(length), 0, -1) if length % rows == 0)
    return 1, rows, length // rows


def _qwen3_vl_inputs(prompt: Prompt) -> dict[str, Any]:
    inputs: dict[str, Any] = {"mm_encoder_outputs": {}}
    for kind, name in {MediaKind.IMAGE: "image", MediaKind.VIDEO_FRAME: "video"}.items():
        own = [(span.grid, rows) for span, rows in prompt.media if span.kind == kind and span.grid is not None]
        if not own:
            continue
        # transformers has a grid of patches, of which 2 x 2 become a token.
        inputs[f"{name}_grid_thw"] = torch.tensor([(grid[0], 2 * grid[1], 2 * grid[2]) for grid, _ in own])
        first, *added = zip(*(rows.split(48, dim=1) for _, rows in own))
        inputs["mm_encoder_outputs"][name] = SimpleNamespace(pooler_output=first, deepstack_features=added)
    return inputs


def media_model(kind: str, folder: Path, kernels: str = "native") -> MediaModel:
    """Make a random model of one of KINDS, or a Qwen 3.5, and save it to a folder."""
    if kind == "gemma3":
        reference = write_gemma3_with_vision(folder)
    elif kind == "unified":
        reference = write_gemma4_unified(folder)
    elif kind == "llava":
        reference = write_llava(folder, max_position_embeddings=4096)
    elif kind == "qwen3_5":
        reference = write_qwen3_5_with_vision(folder)
    elif kind.startswith("qwen3_vl"):
        reference = write_qwen3_vl(folder, experts=kind == "qwen3_vl_moe")
    else:
        whole = {"use_bidirectional_attention": "vision"} if kind == "experts" else {}
        reference = write_gemma4_with_media(folder, kind, **whole)
    model = load_model(folder, torch.float32, select_kernels(CPU, kernels), CPU)
    return MediaModel(model, reference, kind)
