"""The parts of an adapter for the linear layers of a model, from the adapter's files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.core.adapters import CONFIG_FILE, TENSORS_FILE, AdapterFiles
from paceline.core.errors import ModelError
from paceline.kernels.adapters import LowRank
from paceline.models.adapters.base_weights import BaseWeights
from paceline.models.adapters.linears import NamedLinear
from paceline.models.adapters.parts import make_part
from paceline.models.adapters.peft_config import HEAD, PeftConfig, read_peft_config
from paceline.models.adapters.peft_tensors import ModuleTensors, read_tensors

_PLACES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""Spellings of the beginning of a text model's modules. An adapter may have another one than the checkpoint."""
_HEADER_BYTES = 2048
"""Largest size of what the header says about one module."""
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names of several modules together, which vLLM gives its own fused layers."""


@dataclass(frozen=True, slots=True)
class AdapterRules:
    """What adapters may be, as the operator says."""

    most_rank: int = 16
    only: frozenset[str] = frozenset()
    """Names of the modules whose adapters are applied; those of other modules are left out. Empty for all."""

    def applies_to(self, module: str) -> bool:
        return not self.only or any(module == name or module.endswith(f".{name}") for name in self.only)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class LoadedAdapter:
    """An adapter in memory."""

    digest: bytes
    parts: tuple[LowRank | None, ...]
    """[linear layers of the model]; None where the adapter changes nothing."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts if part is not None)


def target_modules(names: Collection[str]) -> frozenset[str]:
    """Return the modules that --lora-target-modules means."""
    return frozenset(each for name in names for each in _FUSED.get(name, (name,)))


def most_adapter_bytes(linears: Sequence[NamedLinear], most_rank: int) -> int:
    """Return the largest size of adapter_model.safetensors: tensors of all modules in fp32, and a header.

    Besides its two matrices, a module may have two biases and magnitudes. The head may come with its own matrix.
    """
    modules = {each.name: each.size_in + each.module_outputs for each in linears}
    whole = [each.size_in * each.module_outputs for each in linears if _plain(each.name) == HEAD]
    return 4 * (most_rank + 3) * sum(modules.values()) + 4 * sum(whole) + (1 << 20) + _HEADER_BYTES * len(modules)


def load_adapter(
    files: AdapterFiles, linears: Sequence[NamedLinear], dtype: torch.dtype, rules: AdapterRules, base: BaseWeights
) -> LoadedAdapter:
    """Return an adapter for a model with these linear layers.

    Args:
        dtype: dtype of the adapter in memory.
        base: the matrices of these layers.

    Raises:
        ModelError: the adapter is damaged, does not fit the model, or has a setting that is not supported. The message
            names the key.
    """
    config, tensors = read_peft_config(files.config), read_tensors(files.tensors)
    places: dict[str, list[int]] = {}
    for index, each in enumerate(linears):
        places.setdefault(_plain(each.name), []).append(index)
    parts: list[LowRank | None] = [None] * len(linears)
    for module, own in tensors.items():
        found = places.get(_plain(module), ())
        if not found:
            raise _no_such_layer(module)
        rank = _check_module(module, own, config, linears[found[0]])
        if rules.applies_to(module):
            if rank > rules.most_rank:
                raise ModelError(f"{module} has the rank {rank}; raise --max-lora-rank, which is {rules.most_rank}")
            for index in found:
                if parts[index] is not None:
                    raise ModelError(f"{TENSORS_FILE} has tensors for {module} twice, with different beginnings")
                if own.matrix is not None and not base.is_matrix(linears[index], own.matrix):
                    raise ModelError(
                        f"{TENSORS_FILE}: the whole matrix of {module} is not that of this model; was the adapter made "
                        "for another model, or with other tokens? If not, merge it into the model"
                    )
                parts[index] = part = make_part(own, config.scale_of(module), linears[index], dtype, base)
                if not part.is_finite:
                    raise ModelError(f"{module}: numbers are too large for {dtype}; choose another --lora-dtype")
    _check_complete(config, tensors, places)
    return LoadedAdapter(files.digest, tuple(parts))


def _plain(module: str) -> str:
    """Return a module's name without the beginning that different spellings give it."""
    return next((module.removeprefix(place) for place in _PLACES if module.startswith(place)), module)


def _no_such_layer(module: str) -> ModelError:
    return ModelError(
        f"{TENSORS_FILE}: {module:.200} is no linear layer of this model that can have an adapter; was the adapter "
        "made for another model?"
    )


def _check_module(module: str, own: ModuleTensors, config: PeftConfig, linear: NamedLinear) -> int:
    """Return the rank of a module's adapter, or 0 if only its bias changes.

    Raises ModelError if its tensors do not fit the settings or the model.
    """
    outputs = linear.module_outputs
    for name, vector in (("lora_B.bias", own.bias), ("magnitudes", own.magnitude), ("bias", own.own_bias)):
        if vector is not None and list(vector.shape) != [outputs]:
            raise ModelError(f"{module}: its {name} has the shape {list(vector.shape)}, not {[outputs]}")
    if own.matrix is not None and list(own.matrix.shape) != [outputs, linear.size_in]:
        raise ModelError(f"{module}: its matrix is {list(own.matrix.shape)}, not {[outputs, linear.size_in]}")
    _check_bias(module, own, config, linear)
    if own.down is None or own.up is None:
        return 0
    if not config.targets_module(module):
        raise ModelError(f"{TENSORS_FILE} has tensors for {module}, which {CONFIG_FILE} does not target")
    rank = len(own.down)
    wanted = [rank, linear.size_in], [outputs, rank]
    found = list(own.down.shape), list(own.up.shape)
    if found != wanted:
        raise ModelError(f"{module}: lora_A and lora_B are {found[0]} and {found[1]}, not {wanted[0]} and {wanted[1]}")
    if rank != config.rank_of(module):
        raise ModelError(f"{module} has the rank {rank}, and {CONFIG_FILE} says {config.rank_of(module)}")
    if (own.bias is not None) != config.has_bias:
        raise ModelError(f"{module}: lora_bias of {CONFIG_FILE} contradicts the tensors")
    if (own.magnitude is not None) != config.has_magnitude:
        raise ModelError(f"{module}: use_dora of {CONFIG_FILE} contradicts the tensors")
    return rank


def _check_bias(module: str, own: ModuleTensors, config: PeftConfig, linear: NamedLinear) -> None:
    """Raise ModelError if a module has another bias than settings say, or one that the model lacks."""
    only_bias = own.down is None
    is_wanted = linear.linear.bias is not None and config.biases != "none"
    if own.own_bias is None:
        if is_wanted:
            raise ModelError(f"{CONFIG_FILE}: bias is {config.biases}, and {TENSORS_FILE} has none for {module}")
    elif not is_wanted or (only_bias and config.biases != "all"):
        raise ModelError(
            f"{TENSORS_FILE} has a bias of {module}, which the model has not, or which bias of {CONFIG_FILE} leaves out"
        )


def _check_complete(
    config: PeftConfig, tensors: Mapping[str, ModuleTensors], places: Mapping[str, Collection[int]]
) -> None:
    """Raise ModelError if a module is targeted and has no tensors, so that the file is not complete."""
    beginning = max((module.removesuffix(_plain(module)) for module in tensors), key=len)
    complete = {_plain(module) for module, own in tensors.items() if own.down is not None}
    for name in places:
        spelled = name if name == HEAD else beginning + name
        if name not in complete and config.targets_module(spelled):
            raise ModelError(f"{CONFIG_FILE} targets {spelled}, and {TENSORS_FILE} has no tensors for it")
