"""Loading of a model and its drafter from folders and options, and the layout of their KV cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.config import ChosenQuantization, ModelImpl
from paceline.core.errors import ConfigError
from paceline.core.kv_coding import NO_CODING, KVCoding
from paceline.core.kv_layout import KV_CACHE_PART, GroupShape, KVLayout, make_layout
from paceline.core.speculative import SpeculativeConfig
from paceline.engine.assistant import AssistantDrafter
from paceline.engine.constraint import Grammars
from paceline.engine.drafter import Drafter, ModelDrafter, PromptLookup
from paceline.engine.limits import Limits
from paceline.engine.row_media import EncodingReader
from paceline.engine.runner import ModelRunner, layer_caches
from paceline.kernels.choosing import TokenChooser
from paceline.kernels.interface import Kernels
from paceline.models.adapters.model_adapters import ModelAdapters
from paceline.models.base import Model, kv_groups
from paceline.models.compiled import CompiledModel
from paceline.models.config import (
    encoding_size,
    has_native_encoders,
    is_assistant,
    read_assistant,
    read_config,
    read_facts,
    weight_form,
)
from paceline.models.draft import check_speculative, check_vocabularies, read_draft_config
from paceline.models.encoders.base import Encoders
from paceline.models.gemma4_assistant import Gemma4Assistant
from paceline.models.identity import ModelIdentity, implementation_name, model_identity
from paceline.models.kv_codes import check_kv_coding
from paceline.models.loader import AdapterChoice, load_assistant, load_encoders, load_model
from paceline.models.weight_sizes import weight_sizes


@dataclass(frozen=True, slots=True)
class Loaded:
    """The models of a worker, and everything that is derived from their folders."""

    model: Model
    draft_model: Model | None
    layout: KVLayout
    """Layout of the model's KV groups, followed by those of the draft model. So a handoff includes the draft model's
    KV.
    """
    speculative: SpeculativeConfig | None
    grammars: Grammars
    weights: str
    """Digest of the model's weights, from `ModelIdentity.weights`."""
    chooser: TokenChooser | None = None
    """The kernels' chooser of tokens, if they have one."""
    assistant: Gemma4Assistant | None = None
    """A draft model that reads the model's own KV, and changes nothing in the layout."""
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the model's weights in memory by their format, from `weight_sizes`."""
    load_encoders: Callable[[], Encoders] | None = None
    """A function that loads the model's encoders; None if the model has no encoders."""

    @property
    def max_position(self) -> int:
        """Number of tokens of the longest context that the model and the draft model support."""
        models = (self.model, self.draft_model, self.assistant)
        return min(model.config.max_position for model in models if model is not None)

    @property
    def adapters(self) -> ModelAdapters | None:
        """The adapters of the model; None if it takes none."""
        return self.model.adapters if isinstance(self.model, CompiledModel) else None

    @property
    def max_drafts(self) -> int:
        return self.speculative.num_speculative_tokens if self.speculative is not None else 0

    def runner(self, pool: Tensor, limits: Limits, encodings: EncodingReader | None = None) -> ModelRunner:
        """Return a runner of the model over `pool`, a flat tensor of the KV's dtype.

        Args:
            encodings: reads encodings from the host's arena; None if the model reads none.
        """
        probabilistic = self.speculative is not None and self.speculative.is_probabilistic
        parts = (self.model, self.layout, pool, limits, self.grammars, self._drafter(pool), probabilistic, self.chooser)
        return ModelRunner(*parts, encodings, self.adapters)

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
        draft_caches, first_group = caches[len(self.model.layer_groups) :], len(self.model.group_shapes)
        return ModelDrafter(self.draft_model, draft_caches, draws, first_group, chooser=self.chooser)


def load(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    speculative: SpeculativeConfig | None,
    packed_dir: Path | None = None,
    quantization: ChosenQuantization = "auto",
    model_impl: ModelImpl = "auto",
    trust_remote_code: bool = False,
    kv_coding: KVCoding = NO_CODING,
    adapters: AdapterChoice | None = None,
) -> Loaded:
    """Load a model, and a draft model if `speculative` names one. The draft model is never quantized.

    Args:
        packed_dir: folder in which the workers of a host share packed weights; None shares none.
        model_impl, trust_remote_code: the arguments of `load_model`, also for the draft model.
        kv_coding: the code of keys and values, also for the draft model.
        adapters: the adapters that the model takes; None if it takes none. Drafts are computed without adapters.

    Raises:
        ConfigError: the options contradict the model or each other.
        ModelError: a model cannot be read.
    """
    check_speculative(speculative, folder, model_impl)
    check_kv_coding(kv_coding, read_facts(folder, model_impl), read_draft_config(speculative, model_impl))
    identities = _Identities.read(folder, dtype, speculative, quantization, model_impl, adapters)
    grammars = Grammars(folder)
    code = (model_impl, trust_remote_code)
    with ThreadPoolExecutor(1, "grammars") as thread:  # beside the reading of weights
        preparing = thread.submit(grammars.prepare)
        model = load_model(folder, dtype, kernels, device, packed_dir, quantization, *code, adapters)
    preparing.result()
    model.code_kv(kv_coding)
    draft_folder, has_assistant = _draft(speculative)
    draft_model = assistant = None
    if draft_folder is not None and has_assistant:
        assistant = load_assistant(draft_folder, dtype, kernels, device, packed_dir)
    elif draft_folder is not None:
        draft_model = load_model(draft_folder, dtype, kernels, device, packed_dir, "none", *code)
        check_vocabularies(draft_model.config, model.config)
        draft_model.code_kv(kv_coding.of_drafter())
    shapes, draft_shapes = model.group_shapes, () if draft_model is None else draft_model.group_shapes
    row_size = encoding_size(folder, model_impl)
    encoders = partial(_load_encoders, identities.model, folder, dtype, kernels, device, packed_dir, *code)
    own = shapes, len(model.layer_groups), draft_shapes
    layout = identities.layout(*own, dtype, speculative, row_size, kv_coding)
    identities.check()
    return Loaded(
        model,
        draft_model,
        layout,
        speculative,
        grammars,
        identities.model.weights,
        kernels.chooser,
        assistant,
        weight_sizes(folder, weight_form(folder, quantization), str(dtype).removeprefix("torch.")),
        encoders if row_size else None,
    )


@dataclass(frozen=True, slots=True)
class LoadedEncoders:
    """The encoders of a model, and the facts about its text model that a worker needs to share its arena."""

    encoders: Encoders
    layout: KVLayout
    """The layout of KV and encodings that workers with the whole model use."""
    max_position: int
    weights: str
    """Digest of the model's weights, from `ModelIdentity.weights`."""


def load_encoders_alone(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    speculative: SpeculativeConfig | None,
    packed_dir: Path | None = None,
    quantization: ChosenQuantization = "auto",
    model_impl: ModelImpl = "auto",
    kv_coding: KVCoding = NO_CODING,
    adapters: AdapterChoice | None = None,
) -> LoadedEncoders:
    """Load the encoders of a model without its text model. Arguments and errors are those of `load`.

    Raises ConfigError if the model has no encoders.
    """
    check_speculative(speculative, folder, model_impl)
    if not has_native_encoders(folder, model_impl):
        raise ConfigError(
            f"{folder.name} has no encoders that Paceline computes, so an encode worker has nothing to do; start "
            "prefill and decode workers only"
        )
    identities = _Identities.read(folder, dtype, speculative, quantization, model_impl, adapters)
    config = read_config(folder)
    draft_shapes: tuple[GroupShape, ...] = ()
    shapes, layer_groups = kv_groups(config, kv_coding)
    longest = config.max_position
    draft_folder, has_assistant = _draft(speculative)
    if draft_folder is not None:
        draft = read_assistant(draft_folder) if has_assistant else read_config(draft_folder)
        longest = min(longest, draft.max_position)
        draft_shapes = () if has_assistant else kv_groups(draft, kv_coding.of_drafter())[0]
    row_size = encoding_size(folder, model_impl)
    own = shapes, len(layer_groups), draft_shapes
    layout = identities.layout(*own, dtype, speculative, row_size, kv_coding)
    encoders = _load_encoders(identities.model, folder, dtype, kernels, device, packed_dir)
    identities.check()
    return LoadedEncoders(encoders, layout, longest, identities.model.weights)


def _draft(speculative: SpeculativeConfig | None) -> tuple[Path | None, bool]:
    """Return the folder of the draft model (None if there is none), and whether it is an assistant."""
    if speculative is None or speculative.method != "draft_model":
        return None, False
    folder = Path(speculative.model)
    return folder, is_assistant(folder)


@dataclass(frozen=True, slots=True)
class _Identities:
    """The identities of a model, and of its draft model if that has KV of its own, as they were before loading."""

    model: ModelIdentity
    draft: ModelIdentity | None

    @staticmethod
    def read(
        folder: Path,
        dtype: torch.dtype,
        speculative: SpeculativeConfig | None,
        quantization: ChosenQuantization,
        model_impl: ModelImpl,
        adapters: AdapterChoice | None,
    ) -> _Identities:
        deviation = "" if adapters is None else adapters.deviation(dtype)
        model = model_identity(folder, str(dtype), quantization, implementation_name(folder, model_impl), deviation)
        draft_folder, has_assistant = _draft(speculative)
        if draft_folder is None or has_assistant:
            return _Identities(model, None)
        code = implementation_name(draft_folder, model_impl)
        return _Identities(model, model_identity(draft_folder, str(dtype), "none", code))

    def check(self) -> None:
        """Raise ModelError if a file has changed since it was read."""
        for identity in (self.model, self.draft):
            if identity is not None:
                identity.content.check()

    def layout(
        self,
        shapes: tuple[GroupShape, ...],
        layers: int,
        draft_shapes: tuple[GroupShape, ...],
        dtype: torch.dtype,
        speculative: SpeculativeConfig | None,
        row_size: int,
        kv_coding: KVCoding,
    ) -> KVLayout:
        """Return the layout of a model's blocks.

        Args:
            shapes: the model's groups, with their codes.
            layers: number of the model's layers.
            draft_shapes: groups of a draft model with KV of its own.
            row_size: elements of a row of an encoding; 0 if the model has no encoders.
            kv_coding: the choice of the codes, which the groups have already.
        """
        identity, parts = self.model.digest, self.model.parts
        if self.draft is not None:
            shapes += tuple(shape.of_drafter(layers) for shape in draft_shapes)
            identity += self.draft.digest
            parts += tuple((f"draft model's {name}", value) for name, value in self.draft.parts)
        if kv_coding.code:
            parts += ((KV_CACHE_PART, str(kv_coding)),)
        drafts = 0 if speculative is None else speculative.num_speculative_tokens
        return replace(make_layout(shapes, dtype.itemsize, identity, drafts, row_size), parts=parts)


def _load_encoders(
    identity: ModelIdentity,
    folder: Path,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    packed_dir: Path | None,
    model_impl: ModelImpl = "auto",
    trust_remote_code: bool = False,
) -> Encoders:
    """Load the encoders, perhaps long after the model. Raises ModelError if the folder has changed since then."""
    encoders = load_encoders(folder, dtype, kernels, device, packed_dir, model_impl, trust_remote_code)
    identity.content.check()
    assert encoders is not None
    return encoders
