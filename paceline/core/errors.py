"""Errors that one part of Paceline raises for another, or for the user. Each says what is wrong and what to do."""

from __future__ import annotations


class PacelineError(Exception):
    """The base of all errors that a user may see. `str(error)` is one sentence for the user."""


class ConfigError(PacelineError):
    """A flag or a TOML file is wrong, or contradicts the model folder or the machine."""


class ModelError(PacelineError):
    """A model folder or file cannot be read, its kind is not supported, or it computes NaN."""


class InvalidRequestError(PacelineError):
    """The request can never be served as it is. `param` names the wrong field of the API."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConstraintError(InvalidRequestError):
    """An output cannot be forced to follow its constraint. `param` is PARAM until the gateway replaces it, because only
    the gateway knows the API field that the client used.
    """

    PARAM = "constraint"

    def __init__(self, message: str) -> None:
        super().__init__(message, self.PARAM)


class BusyError(PacelineError):
    """The service has no room for the request now. The same request may succeed later."""


class UnavailableError(PacelineError):
    """The service that was called has ended, is draining or cannot be reached."""


class DrainingError(UnavailableError):
    """The worker is draining or has changed its role, so it did not begin or did not finish the request. Another worker
    continues it. This is not a failure of the worker.
    """


class UntrustedError(UnavailableError):
    """No connection to the service can be trusted: one side's certificate is not valid, only one speaks TLS, or their
    clocks differ. A retry can succeed after the certificate was renewed or the clock was set."""


class TransferError(PacelineError):
    """KV blocks could not be fetched from another host. The cause may be the link between the two hosts, so it does not
    count as a failure of either worker.
    """


class RefusedError(ConfigError):
    """The called service refused this service, because it does not have the cluster's secret. No retry can succeed."""


class StaleError(PacelineError):
    """The lease has another owner now, was released, or has expired."""
