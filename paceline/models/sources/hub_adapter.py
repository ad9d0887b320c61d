"""Adapters of the Hugging Face hub, in the cache that all tools of this machine share. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.core.adapters import CONFIG_FILE, MOST_CONFIG_BYTES, MOST_TENSOR_BYTES, TENSORS_FILE
from paceline.core.errors import ModelError
from paceline.models.sources.hub_download import HubFile, check_space, download, missing_files
from paceline.models.sources.hub_errors import HubUnreachableError, mapped_errors
from paceline.models.sources.hub_name import HubName, parse_hub_name

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubAdapter:
    """A repository of the hub that holds an adapter, at a revision."""

    repository: str
    revision: str = ""
    """A branch, tag or commit; "" for the main branch."""

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


def parse_hub_adapter(place: str) -> HubAdapter | None:
    """Return the hub's adapter that `place` names: `org/name`, or `org/name@revision`.

    Returns None if `place` has another form, or is a folder of this machine, which takes precedence.
    """
    repository, at, revision = place.partition("@")
    name = None if Path(place).exists() else parse_hub_name(repository)
    if name is None or name.gguf or (at and not revision):
        return None
    return HubAdapter(name.repository, revision)


def adapter_folder(place: str, report: Callable[[str], None]) -> Path:
    """Return the folder of an adapter that a user names. Download it from the hub if the cache lacks it.

    Args:
        place: a folder, or a name on the hub as for `parse_hub_adapter`.
        report: called with a sentence about each slow operation, and with lines of its progress (`Progress`).

    Raises ModelError if the adapter cannot be downloaded. Folders are not looked into.
    """
    adapter = parse_hub_adapter(place)
    return Path(place).expanduser().absolute() if adapter is None else fetch_adapter(adapter, report)


def fetch_adapter(adapter: HubAdapter, report: Callable[[str], None]) -> Path:
    """Return the folder of an adapter of the hub, in the cache. Its name is the commit.

    Raises ModelError if it cannot be downloaded, is no adapter, or has its tensors in a pickle only.
    """
    from huggingface_hub import is_offline_mode

    cached = _cached(adapter)
    if cached is not None and (_COMMIT.fullmatch(adapter.revision) or is_offline_mode()):
        return cached
    if is_offline_mode():
        raise ModelError(f"HF_HUB_OFFLINE is set, and the cache does not hold the adapter {adapter}; unset it")
    try:
        with mapped_errors(HubName(adapter.repository), adapter.revision):
            return _fetch(adapter, report)
    except HubUnreachableError:
        if cached is None:
            raise
        report(f"the hub does not answer; taking {adapter} from the cache")
        return cached


def cached_adapter(place: str) -> Path:
    """Return the folder of an adapter that a user names, and that has been fetched before if it is on the hub.

    Raises ModelError if the cache does not hold it.
    """
    adapter = parse_hub_adapter(place)
    if adapter is None:
        return Path(place).expanduser().absolute()
    if (found := _cached(adapter)) is None:
        raise ModelError(f"the adapter {adapter} is not in the cache; start again to download it")
    return found


def _cached(adapter: HubAdapter) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    revision = adapter.revision or None
    files = [
        try_to_load_from_cache(adapter.repository, name, revision=revision) for name in (CONFIG_FILE, TENSORS_FILE)
    ]
    return Path(files[0]).parent if isinstance(files[0], str) and isinstance(files[1], str) else None


def _fetch(adapter: HubAdapter, report: Callable[[str], None]) -> Path:
    """Download an adapter. Raises exceptions of huggingface_hub, besides ModelError."""
    from huggingface_hub import HfApi, hf_hub_download

    repository = adapter.repository
    api = HfApi(library_name="paceline")
    # This also saves in the cache which commit a branch has, so that the branch can be used offline.
    commit = api.resolve_revision(repository, revision=adapter.revision or None).resolved
    listed = {file.rfilename for file in api.model_info(repository, revision=commit).siblings or ()}
    for name in (CONFIG_FILE, TENSORS_FILE):
        if name not in listed:
            advice = "choose a repository that PEFT has written"
            if name == TENSORS_FILE and "adapter_model.bin" in listed:
                advice = "its adapter_model.bin may run code when it is read and is never loaded"
            raise ModelError(f"{adapter} is no adapter, because it has no {name}; {advice}")
    missing = missing_files(repository, commit, [CONFIG_FILE, TENSORS_FILE])
    _check_sizes(adapter, missing)
    if missing:
        check_space(missing)
        download(repository, commit, missing, report)
    return Path(hf_hub_download(repository, TENSORS_FILE, revision=commit)).parent


def _check_sizes(adapter: HubAdapter, files: list[HubFile]) -> None:
    for file in files:
        if file.size > (MOST_CONFIG_BYTES if file.name == CONFIG_FILE else MOST_TENSOR_BYTES):
            raise ModelError(f"{file.name} of {adapter} has {file.size} bytes, which no adapter can have")
