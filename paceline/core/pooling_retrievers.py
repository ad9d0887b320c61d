"""The reader of models that retrieve pages by their images: a vector of each token, from a layer of their own.

https://arxiv.org/abs/2407.01449 (ColPali).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.core.end_tokens import special_tokens
from paceline.core.errors import ModelError
from paceline.core.model_folder import PROCESSOR_FILES, read_object
from paceline.core.pooling_config import DenseModule, HeadModule, NormalizeModule

_CONTRACT = "retrieval_attention_contract"
_SIZES = ("dim", "embedding_dim", "embed_dim", "projection_dim", "colbert_dim")
"""Names that config.json may have for the size of vectors."""
_AUGMENTATIONS = 10
"""Number of augmentation tokens after a query, if there are any."""
RETRIEVERS: Mapping[str, str] = {
    "ColQwen3_5": "custom_text_proj",
    "ColPaliForRetrieval": "embedding_proj_layer",
    "ColQwen2ForRetrieval": "embedding_proj_layer",
}
"""The names of the layer's tensors, by architecture."""
_QWEN2_PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"


@dataclass(frozen=True, slots=True)
class RetrieverSettings:
    """What a folder says of queries and pages. See the fields of the same names of `PoolingConfig`."""

    modules: tuple[HeadModule, ...]
    prompts: Mapping[str, str]
    query_suffix: str
    image_prompt: str
    special_tokens: bool = True


def read_retriever(folder: Path, raw: Mapping[str, Any], architecture: str, hidden: int) -> RetrieverSettings:
    """Return what the folder of a model in RETRIEVERS says.

    Args:
        raw: the values of config.json.
        hidden: number of elements of a hidden state.
    """
    own = {name: value for file in PROCESSOR_FILES for name, value in read_object(folder / file).items()}
    size = next((raw[name] for name in _SIZES if raw.get(name) is not None), 128)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ModelError(
            f"the size of vectors ({' or '.join(_SIZES)}) must be a positive whole number, not {size!r:.80}"
        )
    layer = DenseModule("", hidden, size, None, "none", False, RETRIEVERS[architecture])
    prefix, token, prompt = (
        own.get(name) or "" for name in ("query_prefix", "query_augmentation_token", "visual_prompt_prefix")
    )
    if not all(isinstance(text, str) for text in (prefix, token, prompt)):
        raise ModelError(
            "query_prefix, query_augmentation_token and visual_prompt_prefix of the processor must be texts"
        )
    if architecture == "ColQwen3_5":
        prompts = {"query": prefix} if prefix else {}
        return RetrieverSettings((layer, NormalizeModule()), prompts, token * _AUGMENTATIONS, prompt)
    # The processors of transformers write what their files leave out.
    special = special_tokens(folder, read_object(folder / "tokenizer_config.json"))
    begin, pad = special.get("bos_token", ""), special.get("pad_token", "")
    if architecture == "ColQwen2ForRetrieval":
        prefix, page = prefix or "Query: ", prompt or _QWEN2_PAGE
    else:
        prefix, page = f"{begin}{prefix or 'Question: '}", f"<image>{begin}{prompt or 'Describe the image.'}\n"
    suffix = f"{pad * _AUGMENTATIONS}\n"
    return RetrieverSettings((layer, NormalizeModule()), {"query": prefix}, suffix, page, special_tokens=False)


def attention_contract(raw: Mapping[str, Any]) -> Literal["causal", "bidirectional"]:
    """Return how the tokens of a ColQwen3.5 attend, from the values of config.json.

    Raises ModelError if they do not say it, or say two different things: vectors of the other kind rank badly.
    """
    nested = raw.get("text_config")
    said = [own[_CONTRACT] for own in (raw, nested) if isinstance(own, Mapping) and own.get(_CONTRACT) is not None]
    if not said:
        raise ModelError(
            f"config.json lacks {_CONTRACT}, which says whether tokens see later ones; add causal or bidirectional, as "
            "the model's authors say"
        )
    if any(each not in ("causal", "bidirectional") for each in said) or len(set(map(str, said))) > 1:
        raise ModelError(f"{_CONTRACT} must be causal or bidirectional, not {' and '.join(map(str, said)):.80}")
    found: Literal["causal", "bidirectional"] = "causal" if said[0] == "causal" else "bidirectional"
    return found
