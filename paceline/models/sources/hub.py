"""Models of the Hugging Face hub, in the cache that all tools of this machine share. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath

from paceline.core.config import ModelImpl
from paceline.core.errors import ModelError
from paceline.core.model_folder import PROCESSOR_FILES, QUANTIZATION_FILES
from paceline.core.pooling_files import BGE_M3_FILES, MODULES_FILE, ROOT_FILES, listed_modules
from paceline.core.pooling_folder import read_pooling_config
from paceline.models.config import (
    check_text_encoder,
    implementation,
    is_assistant,
    read_assistant,
    read_facts,
)
from paceline.models.folder import INDEX_FILE, PICKLE_SUFFIXES, SINGLE_FILE, indexed_files, weight_files
from paceline.models.gguf.parts import part_names
from paceline.models.sources.hub_download import check_space, download, missing_files
from paceline.models.sources.hub_errors import HubUnreachableError, hub_site, mapped_errors
from paceline.models.sources.hub_name import HubName
from paceline.models.tokenizer_files import is_template, tokenizer_files

_CONFIG = "config.json"
_SETTINGS = (
    *PROCESSOR_FILES,
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
_WEIGHTS = (".safetensors", *PICKLE_SUFFIXES)


def fetch_from_hub(
    name: HubName,
    revision: str,
    report: Callable[[str], None],
    model_impl: ModelImpl = "auto",
    trust_remote_code: bool = False,
) -> Path:
    """Return the folder of a model, or its GGUF file, in the hub's cache. Download what the cache lacks.

    A model that cannot be served is refused before its weights are downloaded.

    Args:
        revision: a branch, tag or commit; "" for the main branch.
        report: called with a sentence about each slow operation, and with lines of its progress (`Progress`).
        model_impl, trust_remote_code: the arguments of `resolve_model`.

    Raises:
        ModelError: the model cannot be downloaded or served.
    """
    from huggingface_hub import is_offline_mode
    from huggingface_hub.utils import logging

    # The library's warnings say at length what our own errors and reports say.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if is_offline_mode():
        return _cached(name, revision)
    try:
        with mapped_errors(name, revision):
            return _Repository(name, revision, model_impl, trust_remote_code).fetch(report)
    except HubUnreachableError as error:
        try:
            path = _cached(name, revision)
        except ModelError:
            raise error from None
        report(f"{hub_site()} does not answer; taking {name} from the cache")
        return path


def _cached(name: HubName, revision: str) -> Path:
    """Return the folder or file of a model from the cache alone. Raises ModelError if it is absent or incomplete."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE

    file = try_to_load_from_cache(name.repository, name.gguf or _CONFIG, revision=revision or None)
    if not isinstance(file, str):
        wanted = f"revision {revision} of {name}" if revision else str(name)
        raise ModelError(
            f"HF_HUB_OFFLINE is set, and the cache {HF_HUB_CACHE} does not hold {wanted}; unset HF_HUB_OFFLINE to "
            "download it"
        )
    if name.gguf:
        missing = [part for part in part_names(Path(file).name) if not Path(file).with_name(part).is_file()]
        if missing:
            raise ModelError(
                f"HF_HUB_OFFLINE is set, and the cache holds only a part of {name}; unset HF_HUB_OFFLINE to download "
                f"{', '.join(missing)}"
            )
        return Path(file)
    folder = Path(file).parent
    names = [path.name for path in folder.iterdir()]
    try:
        weight_files(folder)
        if not tokenizer_files(names):
            raise ModelError("it has no tokenizer")
    except ModelError as error:
        raise ModelError(
            f"HF_HUB_OFFLINE is set, and the cache holds only a part of {name} ({error}); unset HF_HUB_OFFLINE to "
            "download the rest"
        ) from error
    return folder


class _Repository:
    """A repository at one commit. All methods raise exceptions of huggingface_hub, besides ModelError."""

    def __init__(self, name: HubName, revision: str, model_impl: ModelImpl, trust_remote_code: bool) -> None:
        from huggingface_hub import HfApi

        self._name = name
        self._model_impl = model_impl
        self._trust_remote_code = trust_remote_code
        self._id = name.repository
        api = HfApi(library_name="paceline")
        # This also saves in the cache which commit a branch has, so that the branch can be used offline.
        self._commit = api.resolve_revision(self._id, revision=revision or None).resolved
        info = api.model_info(self._id, revision=self._commit)
        self._listed = {file.rfilename for file in info.siblings or ()}

    def fetch(self, report: Callable[[str], None]) -> Path:
        """Return the folder, or the first part of the GGUF file."""
        if self._name.gguf:
            first = PurePosixPath(self._name.gguf)
            parts = [str(first.with_name(part)) for part in part_names(first.name)]
            for part in parts:
                self._check_gguf(part)
            self._fetch_large(parts, report)
            first_file, *_ = [self._fetch(part) for part in parts]
            return first_file
        weights, tokenizer = self._weights_entry(), self._tokenizer()
        folder = self._fetch(_CONFIG).parent
        for name in sorted(self._listed):
            if name in QUANTIZATION_FILES or (self._trust_remote_code and name.endswith(".py")):
                self._fetch(name)
        self._check_model(folder)
        for name in sorted(self._listed):
            if name in _SETTINGS or name in ROOT_FILES or name in tokenizer or is_template(name):
                self._fetch(name)
        modules = self._modules(folder)
        for name in modules:
            if not name.endswith(_WEIGHTS):
                self._fetch(name)
        if not is_assistant(folder):
            with self._named(folder):
                read_pooling_config(folder)
        further = [name for name in (*BGE_M3_FILES, *modules) if name in self._listed and name.endswith(_WEIGHTS)]
        self._fetch_large([*self._weights(weights), *further], report)
        return folder

    def _modules(self, folder: Path) -> list[str]:
        """Return the files of the further modules of sentence-transformers. Weights in pickles are left out if there
        are safetensors beside them.
        """
        if MODULES_FILE not in self._listed:
            return []
        with self._named(folder):
            places = [f"{name}/" for _, name in listed_modules(folder) if name not in ("", ".")]
        found = [name for name in sorted(self._listed) if name.startswith(tuple(places))]
        safe = {PurePosixPath(name).parent for name in found if name.endswith(".safetensors")}
        kept = (".json", ".txt", ".safetensors")
        return [
            name
            for name in found
            if name.endswith(kept) or (name.endswith(PICKLE_SUFFIXES) and PurePosixPath(name).parent not in safe)
        ]

    @contextlib.contextmanager
    def _named(self, folder: Path) -> Iterator[None]:
        """Let errors name the repository in place of its folder in the cache."""
        try:
            yield
        except ModelError as error:
            raise ModelError(str(error).replace(str(folder), self._id)) from error

    def _fetch(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(self._id, name, revision=self._commit))

    def _fetch_large(self, names: Collection[str], report: Callable[[str], None]) -> None:
        missing = missing_files(self._id, self._commit, sorted(names))
        if missing:
            check_space(missing)
            download(self._id, self._commit, missing, report)

    def _check_gguf(self, file: str) -> None:
        if file not in self._listed:
            raise ModelError(f"{self._id} has no file {file}{self._gguf_advice()}")

    def _gguf_advice(self) -> str:
        files = sorted(name for name in self._listed if name.lower().endswith(".gguf"))
        shown = ", ".join(f"{self._id}/{name}" for name in files[:5]) + (", …" if len(files) > 5 else "")
        return f"; its GGUF files are: {shown}" if files else ""

    def _weights_entry(self) -> str:
        """Return the name of the file that is the weights or their index."""
        for name in (INDEX_FILE, SINGLE_FILE):
            if name in self._listed and _CONFIG in self._listed:
                return name
        if advice := self._gguf_advice():
            raise ModelError(f"{self._id} has no safetensors with a {_CONFIG}{advice}; name one of them")
        if any(name.endswith(PICKLE_SUFFIXES) for name in self._listed):
            raise ModelError(
                f"{self._id} has its weights only in a pickle format (such as .bin), which can run code and is never "
                "loaded; choose a repository or revision with safetensors"
            )
        raise ModelError(f"{self._id} lacks {_CONFIG} or {SINGLE_FILE}; choose a repository that has both")

    def _tokenizer(self) -> list[str]:
        files = tokenizer_files(self._listed)
        if not files:
            raise ModelError(f"{self._id} has no tokenizer; choose another repository or revision")
        return files

    def _check_model(self, folder: Path) -> None:
        with self._named(folder):
            if is_assistant(folder):
                read_assistant(folder)
                return
            if check_text_encoder(folder):
                return
            read_facts(folder, self._model_impl)
            if implementation(folder, self._model_impl) == "transformers":
                # Imported here, because it needs torch and transformers.
                from paceline.models.transformers_backend.loading import check_config

                check_config(folder, self._trust_remote_code)

    def _weights(self, entry: str) -> list[str]:
        """Return the names of the weights' files."""
        if entry == SINGLE_FILE:
            return [entry]
        index = self._fetch(entry)
        names = [file.name for file in indexed_files(index.parent)]
        if absent := [name for name in names if name not in self._listed]:
            raise ModelError(f"{self._id} lacks {', '.join(absent)}, which {entry} names; choose another revision")
        return names
