"""The compiled library: its file, its functions, and its C structures, which mirror src/program.h."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import platform
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

from paceline.core.errors import ConfigError
from paceline.kernels.batch import AttentionBatch, GroupTables

_FOLDER = Path(__file__).parent
FILE_NAME = "_library.abi3.so"
"""The name that setuptools gives a library that works with every version of Python."""

HOW_TO_BUILD = (
    "the native CPU kernels are not compiled, or were compiled from another source; install a C++ compiler (g++ 11 or "
    "newer) and reinstall paceline with 'pip install --force-reinstall --no-deps' of the same source"
)


class KernelKind(IntEnum):
    """The kind of an operation; `Kind` of src/program.h has the same numbers."""

    LINEAR = 0
    EMBED = 1
    RMS_NORM = 2
    ROTATION = 3
    ROTATE = 4
    STORE_KV = 5
    ATTENTION = 6
    SILU_AND_MUL = 7
    GELU_TANH_AND_MUL = 8
    ADD = 9
    LINEAR_SILU_AND_MUL = 10
    LINEAR_GELU_TANH_AND_MUL = 11
    SCALE = 12
    CAUSAL_CONV = 13
    SELECTIVE_SCAN = 14
    LOGITS = 15
    CHOOSE = 16
    LINEAR_HEADS = 17
    CONCAT = 18
    ROUTER_LOGITS = 19
    CHOOSE_EXPERTS = 20
    EXPERTS = 21
    ADD_GATED = 22
    SIGMOID_AND_MUL = 23
    GATED_DELTA_RULE = 24
    LAYER_NORM = 25
    GELU = 26
    GELU_AND_MUL = 27
    ADAPT = 28


TYPES = {torch.bfloat16: 0, torch.float32: 1}

ERRORS: dict[int, tuple[type[Exception], str]] = {
    1: (IndexError, "a token id lies outside the vocabulary"),
    2: (IndexError, "a block table or a write names a slot outside the pool"),
    3: (MemoryError, "there is no memory for the intermediate values of an operation"),
    4: (IndexError, "an expert does not exist"),
    5: (ValueError, "a block of states cannot go back to where the step begins, or keep as many tokens as may go back"),
}


class Cache(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("slots", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("slot_stride", "head_stride", "token_stride")),
    ]


class KernelChoice(ctypes.Structure):
    """The sampling parameters of a row, as `Draw` of src/program.h."""

    _fields_ = [
        ("row", ctypes.c_int64),
        ("temperature", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("min_p", "top_p")),
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_int64),
    ]


POINTERS = ("out", "a", "b", "c", "d")
COMPRESSED = 64
"""The number of the `Format` of bf16 weights in 12 bits. tiles.py has the formats of quantized matrices."""
MOST_JOINED = 4
"""Largest number of operations that are computed together; `kMostJoined` of src/program.h."""


class Op(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "type")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in ("n0", "n1", "n2")),
        *((name, ctypes.c_float) for name in ("f0", "f1")),
        ("cache", Cache),
        *((name, ctypes.c_int64) for name in ("group", "format", "joined")),
    ]


class Group(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("block_tokens", "window", "table_width")),
        *((name, ctypes.c_void_p) for name in ("tables", "write_slots", "write_offsets")),
    ]


class KernelStep(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "requests")),
        *((name, ctypes.c_void_p) for name in ("query_start", "context_len", "final_len", "last_keys")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions")),
        ("groups", ctypes.POINTER(Group)),
        ("adapters", ctypes.c_void_p),
    ]


_GROUP_TYPES = (torch.int32, torch.int64, torch.int64)


def make_step(tokens: int, batch: AttentionBatch, groups: Sequence[GroupTables]) -> KernelStep:
    """Return a step as the library reads it. The step keeps the memory that it points to alive."""
    for group in groups:
        if (group.tables.dtype, group.write_slots.dtype, group.write_offsets.dtype) != _GROUP_TYPES:
            raise ValueError("block tables must be int32, the slots and offsets of writes int64")
    requests = len(batch.context_len)
    starts = (ctypes.c_int64 * len(batch.query_start))(*batch.query_start)
    lengths = (ctypes.c_int64 * requests)(*batch.context_len)
    final = (ctypes.c_int64 * requests)(*batch.final_lengths())
    tensors = [(g.tables.contiguous(), g.write_slots.contiguous(), g.write_offsets.contiguous()) for g in groups]
    tables = (Group * len(groups))(
        *(
            Group(group.block_tokens, group.window, group.tables.shape[1], *(tensor.data_ptr() for tensor in tables))
            for group, tables in zip(groups, tensors)
        )
    )
    step = KernelStep(tokens, requests, *map(ctypes.addressof, (starts, lengths, final)), groups=tables)
    of_tokens = {name: getattr(batch, name) for name in ("last_keys", "adapters")}
    for name, tensor in of_tokens.items():
        if tensor is None:
            continue
        if tensor.dtype != torch.int64 or tensor.shape != (tokens,):
            raise ValueError(f"{name} must be {[tokens]} torch.int64, not {list(tensor.shape)} {tensor.dtype}")
        of_tokens[name] = tensor = tensor.contiguous()
        setattr(step, name, tensor.data_ptr())
    step.kept = (starts, lengths, final, of_tokens, tensors, tables)
    return step


@cache
def load_library(folder: Path = _FOLDER) -> ctypes.CDLL:
    """Return the library. Raises ConfigError if it is not compiled, was built from other source, or cannot be loaded
    here.
    """
    file = _library_file(folder)
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise ConfigError(f"the native CPU kernels cannot be loaded: {error}; reinstall paceline here") from error
    if _layout(library) != (ctypes.sizeof(Op), ctypes.sizeof(KernelStep), len(KernelKind)):
        raise ConfigError(HOW_TO_BUILD)
    try:
        _declare(library)
    except AttributeError as error:  # an older library without this function
        raise ConfigError(HOW_TO_BUILD) from error
    return library


def can_copy(pool: torch.Tensor) -> bool:
    """Return whether `copy_blocks` can use this memory, [slots, slot_elements].

    The memory must be contiguous, on the CPU, with slots at multiples of 64 bytes, and the library must be compiled.
    """
    with contextlib.suppress(ConfigError):
        load_library()
        aligned = not (pool.data_ptr() | pool.shape[1] * pool.itemsize) % 64
        return pool.device.type == "cpu" and pool.is_contiguous() and aligned
    return False


def copy_blocks(
    target: torch.Tensor, target_slots: Sequence[int], source: torch.Tensor, source_slots: Sequence[int]
) -> None:
    """Copy target[target_slots[i]] = source[source_slots[i]]. Writes bypass the caches.

    Args:
        target, source: [slots, slot_elements] of the same dtype, for which `can_copy` is true.
        target_slots, source_slots: existing slots; all target slots must be different.
    """
    size, count = target.shape[1] * target.itemsize, len(target_slots)
    slots = ctypes.c_int64 * count
    load_library().paceline_copy_blocks(
        target.data_ptr(), source.data_ptr(), size, count, slots(*target_slots), slots(*source_slots)
    )


def memory_fence(folder: Path = _FOLDER, machine: str = platform.machine()) -> Callable[[], None]:
    """Return a memory fence: a function that orders reads and writes of memory that processes share.

    For all other threads and processes, this thread's reads and writes before a call of the fence are earlier than
    those after it. Only x86 keeps loads in order, and stores in order, without a fence.

    Raises:
        ConfigError: this `machine` needs the library for a fence, and the library is not compiled.
    """
    try:
        library = load_library(folder)
    except ConfigError:
        if machine != "x86_64":
            raise
        return lambda: None
    # PyDLL keeps the interpreter's lock. Giving it up would take longer than the fence.
    fence = ctypes.PyDLL(library._name).paceline_fence
    fence.argtypes, fence.restype = (), None
    return fence


@cache
def library_digest(folder: Path = _FOLDER) -> str:
    """Return a digest of the library's file. Raises ConfigError if it is not compiled."""
    return hashlib.sha256(_library_file(folder).read_bytes()).hexdigest()[:12]


def _library_file(folder: Path) -> Path:
    file = folder / FILE_NAME
    if not file.exists():
        raise ConfigError(HOW_TO_BUILD)
    return file


def instruction_sets() -> list[str]:
    """Return the names of the instruction sets that run here, best first."""
    names = ctypes.create_string_buffer(256)
    load_library().paceline_instruction_sets(names, len(names))
    return names.value.decode().split()


def _layout(library: ctypes.CDLL) -> tuple[int, ...]:
    """Return the sizes of Op and Step and the number of kinds in the library; empty if it is too old to tell them."""
    if not hasattr(library, "paceline_layout"):
        return ()
    numbers = [ctypes.c_int64() for _ in range(3)]
    library.paceline_layout(*map(ctypes.byref, numbers))
    return tuple(number.value for number in numbers)


def _declare(library: ctypes.CDLL) -> None:
    library.paceline_instruction_sets.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.paceline_packed_bytes.argtypes = [ctypes.c_int32, ctypes.c_int64, ctypes.c_int64]
    library.paceline_packed_bytes.restype = ctypes.c_int64
    library.paceline_pack.argtypes = [ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    library.paceline_pack.restype = None
    library.paceline_coding_bytes.argtypes, library.paceline_coding_bytes.restype = (), ctypes.c_int64
    library.paceline_choose_coding.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    library.paceline_choose_coding.restype = ctypes.c_int64
    library.paceline_compress.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    ]
    library.paceline_compress.restype = None
    library.paceline_is_compressed.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
    library.paceline_use_large_pages.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.paceline_use_large_pages.restype = None
    library.paceline_fence.argtypes, library.paceline_fence.restype = (), None
    library.paceline_copy_blocks.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64)),
    ]
    library.paceline_copy_blocks.restype = None
    library.paceline_team_start.argtypes = [ctypes.c_int, ctypes.c_char_p]
    library.paceline_team_start.restype = ctypes.c_void_p
    library.paceline_team_stop.argtypes = [ctypes.c_void_p]
    library.paceline_team_stop.restype = None
    library.paceline_team_take_turns.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    library.paceline_team_take_turns.restype = None
    library.paceline_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(KernelStep)]
