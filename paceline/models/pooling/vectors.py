"""Operations on vectors in fp32, such as pooled hidden states. A row's result depends on no other row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.core.pooling_config import (
    DenseModule,
    HeadActivation,
    HeadModule,
    NormalizeModule,
    NormModule,
    ScoreActivation,
)
from paceline.kernels.interface import Kernels, NormKind
from paceline.models.checkpoint import refuse_misfits
from paceline.models.pooling.own_tensors import OwnTensors

Vectors = Callable[[Tensor], Tensor]
"""A function of vectors fp32 [n, size] that treats each row by itself."""

_EPS = 1e-24
"""Keeps a vector of zeros as it is when it shall get the length 1."""
_FILES = ("model.safetensors", "pytorch_model.bin")


class VectorLinear:
    """A linear layer in fp32. Its matrix is never quantized."""

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        self._weight = kernels.pack(weight.float())
        self._bias = None if bias is None else bias.float()
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._weight, self._bias)


def by_row(function: Vectors) -> Vectors:
    """Return the same function, computed row by row, because torch's kernels treat the end of a tensor differently."""

    def apply(x: Tensor) -> Tensor:
        return x if not len(x) else torch.cat([function(row[None]) for row in x])

    return apply


ACTIVATIONS: Mapping[HeadActivation, Vectors] = {
    "none": lambda x: x,
    "tanh": by_row(torch.tanh),
    "relu": torch.relu,
    "gelu": by_row(F.gelu),
    "silu": by_row(F.silu),
    "sigmoid": by_row(torch.sigmoid),
}
SCORE_ACTIVATIONS: Mapping[ScoreActivation, Vectors] = {
    "none": lambda x: x,
    "sigmoid": by_row(torch.sigmoid),
    "softmax": by_row(lambda x: torch.softmax(x, dim=-1)),
}


class Normalize:
    """Gives each vector the length 1."""

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self._kernels, self._device = kernels, device

    def __call__(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        weight = torch.full((size,), size**-0.5, dtype=torch.float32, device=self._device)
        return self._kernels.rms_norm(x, weight, _EPS / size, NormKind.WIDE)


class VectorHeads:
    """Makes the modules that follow after pooling, with weights from their folders."""

    def __init__(self, folder: Path, kernels: Kernels, device: torch.device) -> None:
        self._folder, self._kernels, self._device = folder, kernels, device

    def make(self, module: HeadModule) -> Vectors:
        """Return a module as a function.

        Raises ModelError if its weights are missing, or do not fit its config.
        """
        if isinstance(module, NormalizeModule):
            return Normalize(self._kernels, self._device)
        if isinstance(module, DenseModule) and not module.folder:
            return self._own(module)
        tensors = self._read(module.folder)
        return self._dense(module, tensors) if isinstance(module, DenseModule) else self._norm(module, tensors)

    def _own(self, module: DenseModule) -> Vectors:
        """Return a layer without an activation, whose tensors are among the model's own."""
        name = module.name
        with OwnTensors(self._folder) as tensors:
            weight = tensors.take(f"{name}.weight", module.size_out, module.size_in)
            has_bias = tensors.has(f"{name}.bias") if module.bias is None else module.bias
            bias = tensors.take(f"{name}.bias", module.size_out) if has_bias else None
        device = self._device
        return VectorLinear(weight.to(device), None if bias is None else bias.to(device), self._kernels)

    def _dense(self, module: DenseModule, tensors: Mapping[str, Tensor]) -> Vectors:
        size_in, size_out = module.size_in, module.size_out
        needed: dict[str, tuple[int, ...]] = {"linear.weight": (size_out, size_in)}
        if module.bias:
            needed["linear.bias"] = (size_out,)
        if through := module.residual and size_in != size_out:
            needed["residual.weight"] = (size_out, size_in)
        _check(module.folder, tensors, needed)
        linear = VectorLinear(tensors["linear.weight"], tensors.get("linear.bias"), self._kernels)
        residual = VectorLinear(tensors["residual.weight"], None, self._kernels) if through else None
        activate = ACTIVATIONS[module.activation]

        def dense(x: Tensor) -> Tensor:
            out = activate(linear(x))
            if not module.residual:
                return out
            return out + (x if residual is None else residual(x))

        return dense

    def _norm(self, module: NormModule, tensors: Mapping[str, Tensor]) -> Vectors:
        _check(module.folder, tensors, dict.fromkeys(("norm.weight", "norm.bias"), (module.size,)))
        weight, bias = (tensors[name].float() for name in ("norm.weight", "norm.bias"))
        return lambda x: self._kernels.layer_norm(x, weight, bias, 1e-5)

    def _read(self, name: str) -> Mapping[str, Tensor]:
        """Return the tensors of a module's folder."""
        path = next((path for file in _FILES if (path := self._folder / name / file).is_file()), None)
        if path is None:
            raise ModelError(
                f"{self._folder / name} lacks {_FILES[0]}, the weights of a module that {self._folder} has"
            )
        return read_tensors(path, self._device)


def read_tensors(path: Path, device: torch.device) -> Mapping[str, Tensor]:
    """Return the tensors of a small file: safetensors, or a file of torch that has nothing but tensors.

    Raises ModelError if the file is damaged or has anything else.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path, device=str(device))
        found = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # the readers raise errors of many kinds
        raise ModelError(f"{path} is damaged or has more than tensors: {error}") from error
    if not isinstance(found, Mapping) or not all(isinstance(each, Tensor) for each in found.values()):
        raise ModelError(f"{path} must have tensors by name")
    return found


def _check(place: str, tensors: Mapping[str, Tensor], needed: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError unless a module has exactly the tensors that it needs."""
    try:
        check_tensors(tensors, needed)
    except ModelError as error:
        raise ModelError(f"{place}: {error}") from None


def check_tensors(tensors: Mapping[str, Tensor], needed: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError, with their names, if tensors are missing, unknown or of another shape."""
    missing = [name for name in needed if name not in tensors]
    misshaped = [
        f"{name} is {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in needed.items()
        if name in tensors and tensors[name].shape != shape
    ]
    refuse_misfits(missing, misshaped, [name for name in tensors if name not in needed])
