"""Loading of a model and its drafter from folders and options, and the layout of their KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.config import ModelImpl, Quantization
from paceline.core.kv_layout import KVLayout, make_layout
from paceline.core.speculative import SpeculativeConfig
from paceline.engine.assistant import AssistantDrafter
from paceline.engine.constraint import Grammars
from paceline.engine.drafter import Drafter, ModelDrafter, PromptLookup
from paceline.engine.row_media import EncodingReader
from paceline.engine.runner import ModelRunner, layer_caches
from paceline.engine.scheduler import Limits
from paceline.kernels.choosing import TokenChooser
from paceline.kernels.interface import Kernels
from paceline.models.base import Model
from paceline.models.compiled import CompiledModel
from paceline.models.config import is_assistant
from paceline.models.draft import check_speculative, check_vocabularies
from paceline.models.gemma4_assistant import Gemma4Assistant
from paceline.models.identity import implementation_name, model_identity
from paceline.models.loader import load_assistant, load_model


@dataclass(frozen=True, slots=True)
class Loaded:
    """The models of a worker, and everything that is derived from their folders."""

    model: Model
    draft_model: Model | None
    layout: KVLayout
    """The model's groups, then the draft model's. So a handoff includes the draft model's KV."""
    speculative: SpeculativeConfig | None
    grammars: Grammars
    chooser: TokenChooser | None = None
    """The kernels' chooser of tokens, if they have one."""
    assistant: Gemma4Assistant | None = None
    """A draft model that reads the model's own KV, and changes nothing in the layout."""

    @property
    def max_position(self) -> int:
        """Tokens of the longest context that all models support."""
        models = (self.model, self.draft_model, self.assistant)
        return min(model.config.max_position for model in models if model is not None)

    @property
    def max_drafts(self) -> int:
        return self.speculative.num_speculative_tokens if self.speculative is not None else 0

    def runner(self, pool: Tensor, limits: Limits, encodings: EncodingReader | None = None) -> ModelRunner:
        """Return a runner of the model over `pool`, a flat tensor of the KV's dtype.

        Args:
            encodings: see `ModelRunner`.
        """
        probabilistic = self.speculative is not None and self.speculative.is_probabilistic
        own = (self.model, self.layout, pool, limits, self.grammars, self._drafter(pool), probabilistic, self.chooser)
        return ModelRunner(*own, encodings)

    def _drafter(self, pool: Tensor) -> Drafter | None:
        config = self.speculative
        if config is None:
            return None
        if config.method == "ngram":
            return PromptLookup(config.prompt_lookup_min, config.prompt_lookup_max)
        caches = layer_caches(self.layout, pool)
        draws = config.is_probabilistic
        if self.assistant is not None:
            assert isinstance(self.model, CompiledModel)
            return AssistantDrafter(self.assistant, self.model, caches, draws, self.chooser)
        if self.draft_model is None:
            return ModelDrafter(self.model, caches, draws, layers=config.num_layers, chooser=self.chooser)
        own, first_group = caches[len(self.model.layer_groups) :], len(self.model.group_shapes)
        return ModelDrafter(self.draft_model, own, draws, first_group, chooser=self.chooser)


def load(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    speculative: SpeculativeConfig | None,
    packed_dir: Path | None = None,
    quantization: Quantization = "none",
    model_impl: ModelImpl = "auto",
    trust_remote_code: bool = False,
) -> Loaded:
    """Load a model, and a draft model if `speculative` names one. The draft model is never quantized.

    Args:
        packed_dir: folder in which the workers of a host share packed weights; None shares none. Quantized weights are
            never shared.
        model_impl, trust_remote_code: see `load_model`; they also apply to the draft model.

    Raises:
        ConfigError: the options do not go with the model or with each other.
        ModelError: a model cannot be read.
    """
    check_speculative(speculative, folder, model_impl)
    code = (model_impl, trust_remote_code)
    model = load_model(folder, dtype, kernels, device, packed_dir, quantization, *code)
    shapes = model.group_shapes
    identity = model_identity(folder, str(dtype), quantization, implementation_name(folder, model_impl))
    draft_model = None
    if speculative is None:
        layout = make_layout(shapes, dtype.itemsize, identity)
        return Loaded(model, None, layout, None, Grammars(folder), kernels.chooser)
    draft_folder = Path(speculative.model)
    if speculative.method == "draft_model" and is_assistant(draft_folder):
        assistant = load_assistant(draft_folder, dtype, kernels, device, packed_dir)
        layout = make_layout(shapes, dtype.itemsize, identity, speculative.num_speculative_tokens)
        return Loaded(model, None, layout, speculative, Grammars(folder), kernels.chooser, assistant)
    if speculative.method == "draft_model":
        draft_model = load_model(draft_folder, dtype, kernels, device, packed_dir, "none", *code)
        check_vocabularies(draft_model.config, model.config)
        first = len(model.layer_groups)
        shapes += tuple(shape.of_drafter(first) for shape in draft_model.group_shapes)
        identity += model_identity(draft_folder, str(dtype), "none", implementation_name(draft_folder, model_impl))
    layout = make_layout(shapes, dtype.itemsize, identity, speculative.num_speculative_tokens)
    return Loaded(model, draft_model, layout, speculative, Grammars(folder), kernels.chooser)
