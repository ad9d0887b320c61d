"""Errors that cross a boundary. Each says what is wrong and what to do."""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors that a user may see: `str(error)` is one clear sentence."""


class ConfigError(PacelineError):
    """A flag, a TOML file, a model folder or the machine does not fit."""


class ModelError(PacelineError):
    """A model folder or file cannot be read or is of an unsupported kind."""


class InvalidRequestError(PacelineError):
    """The request can never be served as it is. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConstraintError(InvalidRequestError):
    """An output cannot be held to its constraint. Who says so knows no field of the API; the gateway puts in the one
    that the client used."""

    PARAM = "constraint"

    def __init__(self, message: str) -> None:
        super().__init__(message, self.PARAM)


class BusyError(PacelineError):
    """No room now; the same request may succeed later."""


class UnavailableError(PacelineError):
    """The other side is gone, draining or unreachable."""


class TransferError(PacelineError):
    """KV blocks could not be brought over from another host. Neither the worker that says so nor the other one need be
    at fault: it may be the link between their hosts."""


class RefusedError(ConfigError):
    """The other side does not know us: we lack its secret. To try again, there or elsewhere, is of no use."""


class StaleError(PacelineError):
    """The hold belongs to somebody else now, was released, or has expired."""
