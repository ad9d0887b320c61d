"""Options: fields that are a flag and a key of a TOML file. Their values are checked when a config is made."""

from __future__ import annotations

import re
from typing import Annotated, Any, cast, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from paceline.core.errors import ConfigError


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a text such as `512MiB`, `4GiB`, `4G` or `1024`. Units are powers of 1024.

    Raises ConfigError.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is not an amount of memory; write it like 512MiB or 4GiB")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))


def _check_size(text: str, info: ValidationInfo) -> str:
    if not parse_bytes(text):
        raise ConfigError(f"{flag(str(info.field_name))} must not be 0; write it like 512MiB or 4GiB")
    return text


Size = Annotated[str, AfterValidator(lambda text, info: text and _check_size(text, info))]
"""An amount of memory as a user writes it, for `parse_bytes`, or an empty text."""
AutoSize = Annotated[str, AfterValidator(lambda text, info: text if text == "auto" else _check_size(text, info))]
"""An amount of memory, or "auto"."""


def flag(name: str) -> str:
    """Return the command-line flag of an option: "--max-seqs" for `max_seqs`."""
    return "--" + name.replace("_", "-")


def listed(text: str) -> tuple[str, ...]:
    """Return the parts of a text that are separated by commas, without empty ones and white space around them."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def option(
    default: Any,
    help: str,
    group: str = "options",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    is_secret: bool = False,
) -> Any:
    """Return the field that declares an option in a subclass of `Options`.

    Args:
        help: text of --help and of the reference.
        group: heading in --help under which the option is listed.
        at_least: smallest number that is accepted.
        at_most: largest number that is accepted.
        is_secret: whether the value may contain a key or a password. Such a value is never shown.
    """
    extra: dict[str, Any] = {"group": group, "at_least": at_least, "at_most": at_most, "is_secret": is_secret}
    return Field(default, ge=at_least, le=at_most, description=help, repr=not is_secret, json_schema_extra=extra)


def same_option(service: type[Options], name: str, *, default: Any = None, help: str = "", group: str = "") -> Any:
    """Return a copy of an option of `service`, with another default, help text or group if one is given."""
    least, most = range_of(service, name)
    return option(
        service.model_fields[name].default if default is None else default,
        help or help_of(service, name),
        group or group_of(service, name),
        at_least=least,
        at_most=most,
        is_secret=name in secrets_of(service),
    )


def secrets_of(service: type[Options]) -> set[str]:
    """Return the options whose values are never shown."""
    return {name for name in service.model_fields if _extra(service, name)["is_secret"]}


def help_of(service: type[Options], name: str) -> str:
    return str(service.model_fields[name].description)


def group_of(service: type[Options], name: str) -> str:
    """Return the heading in --help under which an option is listed."""
    return str(_extra(service, name)["group"])


def range_of(service: type[Options], name: str) -> tuple[float | None, float | None]:
    """Return the smallest and the largest number that an option accepts; None if there is no bound."""
    extra = _extra(service, name)
    return extra["at_least"], extra["at_most"]


def _extra(service: type[Options], name: str) -> dict[str, Any]:
    return cast(dict[str, Any], service.model_fields[name].json_schema_extra)


class Options(BaseModel):
    """Immutable options, checked when they are made. A wrong value raises ConfigError, which names its flag."""

    # A process makes only one of all configs, so the validators of the others are never compiled.
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, values: Any, handler: Any) -> Any:
        try:
            return handler(values)
        except ValidationError as error:
            raise ConfigError(cls._sentence(error.errors()[0])) from None

    @classmethod
    def _sentence(cls, error: Any) -> str:
        """Return a sentence that tells the user what is wrong with an option."""
        name, value = str(error["loc"][0]), error["input"]
        if name not in cls.model_fields:
            return f"there is no option {flag(name)}"
        field = cls.model_fields[name]
        if error["type"] == "literal_error":
            return f"{flag(name)} must be {alternatives(field.annotation)}, not {value!r}"
        least, most = range_of(cls, name)
        if isinstance(value, int | float) and type(value) is not bool and error["type"] in _RANGE_ERRORS:
            wanted = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
            return f"{flag(name)} must be {wanted}, not {value:g}"
        return f"{flag(name)} must be of type {type(field.default).__name__}, not {type(value).__name__}"


_RANGE_ERRORS = ("greater_than_equal", "less_than_equal", "finite_number")


def alternatives(choice: Any) -> str:
    """Return the values of a Literal as words for a message: "a, b or c"."""
    *others, last = map(str, get_args(choice))
    return f"{', '.join(others)} or {last}"


def check_all_or_none(**options: str) -> None:
    """Raise ConfigError if some of the options are given and others are empty."""
    given = [name for name, value in options.items() if value]
    missing = [name for name, value in options.items() if not value]
    if given and missing:
        raise ConfigError(f"{flag(given[0])} needs {flag(missing[0])}")
