"""Tiny models that retrieve pages by their images, and their vectors by `transformers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.test_encoders import reference_of_qwen3_vl
from tests.tiny_checkpoints import QWEN3_VL_TOKENS, write_qwen3_5_with_vision

DIM = 24
PLACEHOLDER, _, START, END = QWEN3_VL_TOKENS
_NAMES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
SIDE = 8
"""Pixels of a side of an image that become one token."""


class Retriever:
    """A tiny model of transformers that retrieves pages."""

    reference: Any
    image_token: int
    rows, columns = 3, 4
    """Numbers of tokens of an image."""
    has_grid = False
    side = SIDE
    """Pixels of an image for a token."""

    def vectors(self, tokens: Sequence[int], image: Tensor | None = None) -> Tensor:
        """Return the vectors of tokens, fp32 [tokens, DIM].

        Args:
            image: uint8 [height, width, 3], which stands at the placeholders.
        """
        raise NotImplementedError


class ColQwen(Retriever):
    """A tiny ColQwen3.5, in the form of its authors.

    Args:
        contract: how its tokens attend; None leaves the field out.
        bias: whether the layer that makes vectors has a bias.
        media_tokens: placeholders of images and videos, and the tokens before and after them.
        vocab_size: number of tokens; None for that of other tiny models.
        processor: fields of processor_config.json.
    """

    def __init__(
        self,
        folder: Path,
        contract: str | None = "causal",
        bias: bool = True,
        media_tokens: Sequence[int] = QWEN3_VL_TOKENS,
        vocab_size: int | None = None,
        **processor: object,
    ) -> None:
        self.contract, self.image_token, self.has_grid = contract, media_tokens[0], True
        self.reference: Any = write_qwen3_5_with_vision(
            folder, **({} if vocab_size is None else {"vocab_size": vocab_size})
        )
        hidden = self.reference.config.text_config.hidden_size
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.layer = torch.nn.Linear(hidden, DIM, bias=bias)
        path = folder / "model.safetensors"
        tensors = {
            name.removeprefix("model."): tensor
            for name, tensor in load_file(path).items()
            if not name.startswith("lm_head.")
        }
        own = {f"custom_text_proj.{name}": tensor.detach() for name, tensor in self.layer.named_parameters()}
        save_file({**tensors, **own}, path)
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["ColQwen3_5"], "dim": DIM, **dict(zip(_NAMES, media_tokens, strict=True))}
        if contract is not None:
            config["retrieval_attention_contract"] = contract
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "processor_config.json").write_text(json.dumps(processor))

    @torch.no_grad()
    def vectors(self, tokens: Sequence[int], image: Tensor | None = None) -> Tensor:
        core, ids = self.reference.model, torch.tensor([list(tokens)])
        embedded, positions = core.get_input_embeddings()(ids), None
        if image is not None:
            places = ids[0] == self.image_token
            embedded[0, places] = reference_of_qwen3_vl(self.reference, image.expand(2, -1, -1, -1))
            grid = torch.tensor([[1, 2 * image.shape[0] // SIDE, 2 * image.shape[1] // SIDE]])
            positions, _ = core.get_rope_index(ids, mm_token_type_ids=places.int()[None], image_grid_thw=grid)
        mask: Any = None
        if self.contract == "bidirectional":
            full = torch.zeros(1, 1, len(tokens), len(tokens))
            mask = {"full_attention": full, "linear_attention": None}
        states = core.language_model(inputs_embeds=embedded, position_ids=positions, attention_mask=mask)
        found: Tensor = torch.nn.functional.normalize(self.layer(states.last_hidden_state[0]), dim=-1)
        return found


_TEXT = {"vocab_size": 110, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT |= {"num_key_value_heads": 2, "hidden_size": 48, "max_position_embeddings": 256}


class ColQwen2(Retriever):
    """A tiny ColQwen2 of transformers."""

    image_token, side = 95, 8

    def __init__(self, folder: Path) -> None:
        vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 4, "hidden_size": 48, "mlp_ratio": 2}
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2]}
        tokens = {"vision_start_token_id": 97, "vision_end_token_id": 98, "image_token_id": 95, "video_token_id": 96}
        own = {"text_config": {**_TEXT, "rope_parameters": rope}, "vision_config": vision, **tokens}
        config = transformers.ColQwen2Config(vlm_config={"model_type": "qwen2_vl", **own}, embedding_dim=DIM)
        self.reference = _saved(transformers.ColQwen2ForRetrieval, config, folder)

    @torch.no_grad()
    def vectors(self, tokens: Sequence[int], image: Tensor | None = None) -> Tensor:
        inputs: dict[str, Any] = {}
        if image is not None:
            size = {"patch_size": 4, "do_resize": False, "return_tensors": "pt"}
            cut = transformers.Qwen2VLImageProcessorPil(**size)(image.permute(2, 0, 1).numpy())
            inputs = {"pixel_values": cut["pixel_values"][None], "image_grid_thw": cut["image_grid_thw"]}
        found: Tensor = self.reference(torch.tensor([list(tokens)]), **inputs).embeddings[0]
        return found


class ColPali(Retriever):
    """A tiny ColPali of transformers."""

    image_token, rows, columns, side = 95, 3, 3, 14

    def __init__(self, folder: Path) -> None:
        text = {"model_type": "gemma", **_TEXT, "head_dim": 16}
        vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 40, "image_size": 42}
        vision |= {"num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14, "vision_use_head": False}
        vision |= {"projection_dim": 48}
        own = {"text_config": text, "vision_config": vision, "image_token_id": 95, "projection_dim": 48}
        config = transformers.ColPaliConfig(vlm_config={"model_type": "paligemma", **own}, embedding_dim=DIM)
        self.reference = _saved(transformers.ColPaliForRetrieval, config, folder)

    @torch.no_grad()
    def vectors(self, tokens: Sequence[int], image: Tensor | None = None) -> Tensor:
        pixels = None if image is None else (image.permute(2, 0, 1)[None] / 127.5 - 1)
        ids = torch.tensor([list(tokens)])
        types = torch.zeros_like(ids)  # the processor gives all tokens this type, with which they see each other
        found: Tensor = self.reference(ids, pixel_values=pixels, token_type_ids=types).embeddings[0]
        return found


def _saved(kind: Any, config: Any, folder: Path) -> Any:
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = kind(config).eval()
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.2) if parameter.dim() > 1 else parameter.data.add_(
                torch.randn_like(parameter) * 0.1
            )
    model.save_pretrained(folder)
    return model
