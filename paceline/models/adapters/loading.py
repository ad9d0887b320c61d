"""The parts of an adapter for the linear layers of a model, from the adapter's files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.core.adapters import CONFIG_FILE, TENSORS_FILE, AdapterFiles
from paceline.core.errors import ModelError
from paceline.kernels.adapters import LowRank
from paceline.models.adapters.linears import NamedLinear
from paceline.models.adapters.peft_config import PeftConfig, read_peft_config
from paceline.models.adapters.peft_tensors import ModuleTensors, read_tensors

_PLACES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""Spellings of the beginning of a text model's modules. An adapter may have another one than the checkpoint."""
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
    """Return the largest size of adapter_model.safetensors: tensors of all modules in fp32, and a header."""
    modules = {each.name: each.size_in + each.module_outputs for each in linears}
    return 4 * (most_rank + 1) * sum(modules.values()) + (1 << 20)


def load_adapter(
    files: AdapterFiles, linears: Sequence[NamedLinear], dtype: torch.dtype, rules: AdapterRules
) -> LoadedAdapter:
    """Return an adapter for a model with these linear layers.

    Args:
        dtype: dtype of the adapter in memory.

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
                parts[index] = part = _part(own, config.scale_of(module), linears[index], dtype)
                if not part.is_finite:
                    raise ModelError(f"{module}: numbers are too large for {dtype}; choose another --lora-dtype")
    _check_complete(config, tensors, places)
    return LoadedAdapter(files.digest, tuple(parts))


def _part(own: ModuleTensors, scale: float, linear: NamedLinear, dtype: torch.dtype) -> LowRank:
    of = linear.outputs
    outputs = slice(of.start, of.stop) if isinstance(of, range) else torch.tensor(of)
    # Copies, because a view would keep the whole file in memory.
    down, up = own.down.to(dtype, copy=True), own.up[outputs].T.to(dtype).clone(memory_format=torch.contiguous_format)
    bias = None if own.bias is None else own.bias[outputs].to(dtype, copy=True)
    return LowRank(down, up, scale, bias)


def _plain(module: str) -> str:
    """Return a module's name without the beginning that different spellings give it."""
    return next((module.removeprefix(place) for place in _PLACES if module.startswith(place)), module)


def _no_such_layer(module: str) -> ModelError:
    if module.rpartition(".")[2] in ("lm_head", "embed_tokens"):
        return ModelError(
            f"{TENSORS_FILE}: {module} cannot have an adapter here, only the linear layers inside of the model; merge "
            "the adapter into the model"
        )
    return ModelError(
        f"{TENSORS_FILE}: {module:.200} is no linear layer of this model that can have an adapter; was the adapter "
        "made for another model?"
    )


def _check_module(module: str, own: ModuleTensors, config: PeftConfig, linear: NamedLinear) -> int:
    """Return the rank of a module's adapter. Raises ModelError if its tensors do not fit the settings or the model."""
    if not config.targets_module(module):
        raise ModelError(f"{TENSORS_FILE} has tensors for {module}, which {CONFIG_FILE} does not target")
    rank = len(own.down)
    wanted = [rank, linear.size_in], [linear.module_outputs, rank]
    found = list(own.down.shape), list(own.up.shape)
    if found != wanted or (own.bias is not None and list(own.bias.shape) != [linear.module_outputs]):
        raise ModelError(f"{module}: lora_A and lora_B are {found[0]} and {found[1]}, not {wanted[0]} and {wanted[1]}")
    if rank != config.rank_of(module):
        raise ModelError(f"{module} has the rank {rank}, and {CONFIG_FILE} says {config.rank_of(module)}")
    if (own.bias is not None) != config.has_bias:
        raise ModelError(f"{module}: lora_bias of {CONFIG_FILE} contradicts the tensors")
    return rank


def _check_complete(
    config: PeftConfig, tensors: Mapping[str, ModuleTensors], places: Mapping[str, Collection[int]]
) -> None:
    """Raise ModelError if a module is targeted and has no tensors, so that the file is not complete."""
    first = next(iter(tensors))
    beginning = first.removesuffix(_plain(first))
    for name in places:
        spelled = beginning + name
        if spelled not in tensors and config.targets_module(spelled):
            raise ModelError(f"{CONFIG_FILE} targets {spelled}, and {TENSORS_FILE} has no tensors for it")
