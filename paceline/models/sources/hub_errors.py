"""The errors of the hub's library, mapped to sentences that say what to do. Imports no torch."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

from paceline.core.errors import ModelError
from paceline.models.sources.hub_name import HubName


class HubUnreachableError(ModelError):
    """Raised if the hub does not answer. A model that is in the cache can be used nevertheless."""


@contextmanager
def mapped_errors(name: HubName, revision: str) -> Iterator[None]:
    """Turn the exceptions of huggingface_hub into errors for the user.

    The texts of these exceptions are never shown, because they are long and come from the hub.

    Args:
        revision: the revision that the user gave; "" for the repository's main branch.

    Raises:
        HubUnreachableError: the hub does not answer, or answers that it has a failure.
        ModelError: the hub refuses the download, or the cache cannot be written.
    """
    import httpx2
    from huggingface_hub.errors import HFValidationError, RevisionResolutionError

    try:
        yield
    except HFValidationError as error:
        raise ModelError(f"{name} is not a valid name of a model on the hub; it must be like org/name") from error
    except (httpx2.HTTPError, RevisionResolutionError, OSError) as error:
        raise _mapped(error, name.repository, revision) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HubUnreachableError(
            f"{hub_site()} does not answer like a Hugging Face hub; check whether a proxy or login page answers instead"
        ) from error


def hub_site() -> str:
    """Return the hub's URL without a user and password."""
    from huggingface_hub.constants import ENDPOINT

    parts = urlsplit(ENDPOINT)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _mapped(error: BaseException, repository: str, revision: str) -> ModelError:
    from huggingface_hub import errors

    site = hub_site()
    page = f"{site}/{repository}"
    if isinstance(error, errors.GatedRepoError):  # a subclass of RepositoryNotFoundError
        return ModelError(f"{repository} is gated: accept its licence at {page}, and {_token_advice()}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(
            f"{repository} has no revision {revision or 'main'}; choose a branch, tag or commit of {page}/tree/main"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"{repository} is neither a folder of this machine nor a model at {site}; check the spelling. If the "
            f"model is private, {_token_advice()}"
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return ModelError(f"a file that {repository} lists is missing at {page}; try another revision")
    if isinstance(error, errors.HfHubHTTPError):
        return _mapped_status(error.response.status_code, repository)
    # The library wraps what went wrong if it has found nothing in its cache either.
    wrappers = (errors.LocalEntryNotFoundError, errors.RevisionResolutionError)
    if isinstance(error, wrappers) and error.__cause__ is not None:
        return _mapped(error.__cause__, repository, revision)
    if isinstance(error, OSError) and error.errno is not None:
        return _mapped_file_error(error)
    return HubUnreachableError(
        f"cannot download {repository} from {site}: the hub cannot be reached or broke the connection; check the "
        "network, the proxy and HF_ENDPOINT, and try again"
    )


def _mapped_status(status: int, repository: str) -> ModelError:
    site = hub_site()
    if status in (401, 403):
        return ModelError(f"{site} refuses access to {repository} (status {status}); {_token_advice()}")
    if status == 429:
        return ModelError(f"{site} refuses further requests for now (status 429); wait some minutes and try again")
    if status >= 500:
        return HubUnreachableError(f"{site} has a failure (status {status}); try again later")
    return ModelError(f"{site} answers a request for {repository} with status {status}; check HF_ENDPOINT")


def _mapped_file_error(error: OSError) -> ModelError:
    from huggingface_hub.constants import HF_HUB_CACHE

    if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT, errno.EPIPE):
        return HubUnreachableError(f"the connection to {hub_site()} broke; try again")
    return ModelError(
        f"cannot write to the cache {HF_HUB_CACHE}: {error.strerror}; free some space there, or choose another folder "
        "with HF_HUB_CACHE"
    )


def _token_advice() -> str:
    """Return what to do so that the hub knows the user. The token itself is never part of a text."""
    from huggingface_hub import get_token

    if get_token() is None:
        return "set HF_TOKEN to a token of your account (or log in: hf auth login)"
    return (
        "check that the token (HF_TOKEN, or the login of hf auth login) is valid and that its account may read the "
        f"model; tokens are made at {hub_site()}/settings/tokens"
    )
