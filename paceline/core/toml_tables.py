"""Files of settings that have a table for each name, such as keys or classes."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from paceline.core.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


def read_entry(model: type[M], where: str, name: str, table: object, kind: str, advice: str) -> M:
    """Check the table of one name and return it as `model`. Names of fields may have hyphens. Errors show no values.

    Args:
        where: the option and the file, for errors.
        kind: noun for one table, such as "key", for errors.
        advice: what the user can do, for errors.

    Raises ConfigError.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {name} must be the heading of a {kind}, [{name}]; {advice}")
    try:
        return model.model_validate({field.replace("-", "_"): value for field, value in table.items()})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: [{name}] {field}: {first['msg']}; {advice}") from None
