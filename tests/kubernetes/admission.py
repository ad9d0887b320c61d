"""The admission policy of kubernetes/base, evaluated as an API server does it: its expressions by a CEL library."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import celpy
import yaml

Json = dict[str, Any]

POLICY, BINDING = yaml.safe_load_all((Path(__file__).parents[2] / "kubernetes" / "base" / "policy.yaml").read_text())
PLANNER = "system:serviceaccount:paceline:planner"


def _value(expression: str, names: Mapping[str, Any]) -> Any:
    limit = sys.getrecursionlimit()
    environment = celpy.Environment()
    sys.setrecursionlimit(limit)  # the library raises it, and tests in the same process expect the usual one
    return environment.program(environment.compile(expression)).evaluate(dict(names))


def is_matched(username: str, namespace: str) -> bool:
    """Return whether the policy has a say in the request of a user."""
    names = {"request": celpy.json_to_cel({"userInfo": {"username": username}, "namespace": namespace})}
    return all(_value(each["expression"], names) for each in POLICY["spec"]["matchConditions"])


def refusals(before: Json, after: Json) -> list[str]:
    """Return why the planner may not change an object in this way; nothing if it may."""
    names = {"object": celpy.json_to_cel(after), "oldObject": celpy.json_to_cel(before)}
    variables = {each["name"]: _value(each["expression"], names) for each in POLICY["spec"]["variables"]}
    names["variables"] = celpy.celtypes.MapType({celpy.celtypes.StringType(k): v for k, v in variables.items()})
    return [each["message"] for each in POLICY["spec"]["validations"] if not _value(each["expression"], names)]
