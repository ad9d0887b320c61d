"""The files of a model's folder that say how its hidden states are pooled."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from paceline.core.errors import ModelError

MODULES_FILE = "modules.json"
"""The list of modules of sentence-transformers."""
SETTINGS_FILE = "config_sentence_transformers.json"
TEXT_FILES = (
    *("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json"),
    *("sentence_camembert_config.json", "sentence_albert_config.json", "sentence_xlm-roberta_config.json"),
)
"""Names under which the settings of the first module are kept."""
COLBERT_FILE = "artifact.metadata"
"""The settings of models of Stanford's ColBERT."""
ROOT_FILES = (MODULES_FILE, SETTINGS_FILE, COLBERT_FILE, *TEXT_FILES)
"""The small files about pooling in a model's own folder."""
BGE_M3_FILES = ("sparse_linear.pt", "colbert_linear.pt")
"""The further heads of bge-m3, beside its weights."""
_PACKAGES = ("sentence_transformers.", "pylate.models.Dense.")


def settings_files(folder: Path) -> list[str]:
    """Return the names of the small files that say how to pool, without weights, in order."""
    names = [name for name in ROOT_FILES if (folder / name).is_file()]
    if MODULES_FILE in names:
        configs = [f"{name}/config.json" for _, name in listed_modules(folder) if name not in ("", ".")]
        names += [name for name in configs if (folder / name).is_file()]
    return names


def pooling_files(folder: Path) -> list[str]:
    """Return the names of all files that say how to pool or hold weights for it.

    A module's folder is taken whole, because any of its files may be read.
    """
    names = [*settings_files(folder), *(name for name in BGE_M3_FILES if (folder / name).is_file())]
    if MODULES_FILE in names:
        for _, name in listed_modules(folder):
            if name not in ("", "."):
                inside = sorted(path for path in (folder / name).rglob("*") if path.is_file())
                names += [path.relative_to(folder).as_posix() for path in inside]
    return list(dict.fromkeys(names))


def listed_modules(folder: Path) -> list[tuple[str, str]]:
    """Return the kind and the folder of each module, in order.

    Raises ModelError if the list cannot be read, or names code or folders that may not be used.
    """
    path = folder / MODULES_FILE
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        found = [(str(each["type"]), str(each["path"])) for each in sorted(modules, key=lambda each: int(each["idx"]))]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    for kind, name in found:
        if not kind.startswith(_PACKAGES):
            raise ModelError(f"{path} lists the module {kind}, which is code of its own that Paceline does not run")
        # The list comes from others, and must not make us open files of other folders.
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ModelError(f"{path}: the folder of a module must be inside the model's folder, not {name!r:.80}")
    return [(kind.rpartition(".")[2], name) for kind, name in found]
