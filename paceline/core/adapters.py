"""Adapters (LoRA) by name: the folders that users give, and the digest of an adapter's content. Imports no torch."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from paceline.core.errors import ConfigError, ModelError
from paceline.core.options import listed

LoraDType = Literal["auto", "bfloat16", "float32"]
"""Dtype of adapters in memory; auto is the model's."""
CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter's folder, as PEFT writes them."""
DIGEST_BYTES = 32
_SHORT_BYTES = 8
MOST_NAME_CHARACTERS = 256
MOST_CONFIG_BYTES = 1 << 20
MOST_TENSOR_BYTES = 8 << 30
"""Largest size of an adapter's tensors. They are read into memory."""

_EXAMPLE = "--lora-modules NAME=FOLDER,OTHER=FOLDER"
_PIECE = 4 << 20


class LoraOptions(Protocol):
    """The options about adapters that gateways and workers have."""

    enable_lora: bool
    lora_modules: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that a request names."""

    name: str
    """Name of the adapter in the API. KV blocks do not depend on it."""
    folder: str
    """Absolute path of its folder, or its name on the hub with a commit."""
    digest: bytes
    """Digest of the content; equal for equal files."""


class UnreadableAdapterError(ModelError):
    """A file of an adapter cannot be opened on this machine, whatever other machines see."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of an adapter's folder, as it was read at one time."""

    config: bytes
    tensors: bytearray

    @property
    def digest(self) -> bytes:
        return _digest(hashlib.sha256(self.config).digest(), hashlib.sha256(self.tensors).digest())


def is_adapter_name(name: str) -> bool:
    """Return whether an adapter may get a name while the cluster runs: lists and terminals can show it as it is."""
    return 0 < len(name) <= MOST_NAME_CHARACTERS and name.isprintable() and name == name.strip() and "," not in name


def short_digest(digest: bytes) -> int:
    """Return the number that stands for an adapter in workers' reports and in routing; 0 for no adapter (empty)."""
    return int.from_bytes(digest[:_SHORT_BYTES])


def adapter_folders(config: LoraOptions) -> dict[str, str]:
    """Return the folder of each adapter of --lora-modules, by its name. Raises ConfigError."""
    if config.lora_modules and not config.enable_lora:
        raise ConfigError("--lora-modules needs --enable-lora")
    text = config.lora_modules.strip()
    folders: dict[str, str] = {}
    for name, folder in _entries_of_json(text) if text[:1] in ("[", "{") else map(_entry, listed(text)):
        if name in folders:
            raise ConfigError(f"--lora-modules names the adapter {name!r} twice")
        folders[name] = folder
    return folders


def _entry(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name.strip() and equals and folder.strip()):
        raise ConfigError(f"--lora-modules: {text!r} is not NAME=FOLDER; write {_EXAMPLE}")
    return name.strip(), folder.strip()


def _entries_of_json(text: str) -> list[tuple[str, str]]:
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--lora-modules is not JSON ({error}); write {_EXAMPLE}") from None
    entries = []
    for value in values if isinstance(values, list) else [values]:
        name, path = (value.get("name"), value.get("path")) if isinstance(value, dict) else (None, None)
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise ConfigError(
                '--lora-modules: each adapter is a JSON object like {"name": "sql", "path": "/loras/sql"}'
            )
        entries.append((name, path))
    return entries


def read_adapter(name: str, folder: str) -> Adapter:
    """Return the adapter in a folder, with the digest of its content. Raises ModelError if it cannot be read."""
    path = Path(os.path.abspath(os.path.expanduser(folder)))
    digests = []
    for file_name, most in ((CONFIG_FILE, MOST_CONFIG_BYTES), (TENSORS_FILE, MOST_TENSOR_BYTES)):
        hashed = hashlib.sha256()
        with open_adapter_file(path, file_name, most) as file:
            while piece := file.read(_PIECE):
                hashed.update(piece)
        digests.append(hashed.digest())
    return Adapter(name, str(path), _digest(*digests))


def read_adapter_files(folder: Path, most_bytes: int = MOST_TENSOR_BYTES) -> AdapterFiles:
    """Read an adapter's folder. Raises ModelError if it has no such files, or if they are too large.

    Args:
        most_bytes: largest size of the tensors.
    """
    with open_adapter_file(folder, CONFIG_FILE, MOST_CONFIG_BYTES) as file:
        config = file.read(MOST_CONFIG_BYTES)
    with open_adapter_file(folder, TENSORS_FILE, most_bytes) as file:
        # Other threads run Python meanwhile, because no bytes are copied by Python itself.
        tensors = bytearray(os.fstat(file.fileno()).st_size)
        if file.readinto(tensors) != len(tensors):
            raise ModelError(f"{folder / TENSORS_FILE} was written to while it was read; load the adapter again")
    return AdapterFiles(config, tensors)


def open_adapter_file(folder: Path, name: str, most: int = MOST_TENSOR_BYTES) -> io.BufferedReader:
    """Return a file of an adapter's folder, opened for reading. Raises ModelError if it is no file, or is too large.

    Args:
        most: largest size of the file, in bytes.
    """
    path = folder / name
    try:
        # A pipe would otherwise wait for its writer.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError:
        raise ModelError(f"{str(path)!r:.200} is no path; an adapter is a folder as PEFT saves it") from None
    except OSError as error:
        advice = ""
        if name == TENSORS_FILE and (folder / "adapter_model.bin").exists():
            advice = "; adapter_model.bin may run code when it is read: save the adapter with safetensors"
        elif not folder.is_dir():
            advice = "; an adapter is a folder as PEFT saves it"
        message = f"the adapter's file {path} cannot be read: {error.strerror}{advice}"
        raise UnreadableAdapterError(message) from error
    found = os.fstat(number)
    if not stat.S_ISREG(found.st_mode) or found.st_size > most:
        os.close(number)
        raise ModelError(f"{path} is not a file") if not stat.S_ISREG(found.st_mode) else _too_large(path, most)
    return open(number, "rb")


def _too_large(path: Path, most: int) -> ModelError:
    return ModelError(f"{path} has more than {most} bytes, which no adapter of this model can have")


def _digest(config: bytes, tensors: bytes) -> bytes:
    return hashlib.sha256(b"adapter" + config + tensors).digest()
