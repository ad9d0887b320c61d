"""All forms of tool calls: what a form writes, its parser reads, and its grammar allows."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.gateway.answers.expressions import Tool
from paceline.services.gateway.answers.form import ToolForm
from paceline.services.gateway.answers.grammar import answer_grammar
from paceline.services.gateway.answers.parts import CallArguments, CallBegin, Content, Part, Reasoning, calls_of
from paceline.services.gateway.answers.registry import REASONING_FORMS, TOOL_FORMS
from tests.services.gateway.answers.pieces import CALLS, NAMES, TEXT, cut, parse
from tests.services.gateway.answers.vocabulary import Vocabulary
from tests.services.gateway.toy_model import write_toy_model

Calls: TypeAlias = list[tuple[str, dict[str, Any]]]

THOUGHT = REASONING_FORMS["think"]
every_form = pytest.mark.parametrize("form", [form() for form in TOOL_FORMS.values()], ids=TOOL_FORMS)
