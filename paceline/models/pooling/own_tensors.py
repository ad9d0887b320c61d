"""Single tensors of a model's own weights, for the layers that pooling reads from there. All are fp32."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.models.folder import weight_files

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class OwnTensors:
    """The tensors of a folder's safetensors, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = ExitStack()
        self._of: dict[str, Any] = {}

    def __enter__(self) -> OwnTensors:
        for path in weight_files(self.folder):
            try:
                file: Any = self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
                self._of.update(dict.fromkeys(file.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is damaged or not a safetensors file: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def has(self, name: str) -> bool:
        return name in self._of

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in fp32. Raises ModelError if it is missing or has another shape."""
        if name not in self._of:
            raise ModelError(f"the weights of {self.folder} do not fit config.json: missing tensors: {name}")
        tensor: Tensor = self._of[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self.folder}: {name} is {list(tensor.shape)} instead of {list(shape)}")
        return self._as_fp32(name, tensor)

    def row(self, name: str, index: int) -> Tensor:
        """Return one row of a matrix, fp32 [size]. Raises ModelError if there is no such row."""
        part = self._of[name].get_slice(name)
        if not 0 <= index < part.get_shape()[0]:
            raise ModelError(f"{self.folder}: {name} has no row for the token {index}")
        return self._as_fp32(name, part[index : index + 1][0])

    def _as_fp32(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _FLOATS:
            raise ModelError(f"{self.folder}: {name} is quantized, but heads that pool must not be")
        return tensor.to(torch.float32, copy=True)
