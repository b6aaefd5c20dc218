"""What pydantic finds wrong with a body, in this server's words: the field, its value, and what it must be.

handlers.py answers with what `validation_problem` makes of it: 400, or 415 for a body that is not declared as JSON.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from deltafold.server.problems import Problem

_Error = Mapping[str, Any]

_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
_OWN_CODES = {"unsupported_field": "unsupported_parameter", "impossible_combination": "invalid_value"}
_UNION_BRANCH = re.compile(r"(str|int|float|bool|none|dict|.*\[.*)$")  # how pydantic names the types it tried
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_SHOWN = 80  # characters of an offending value


def validation_problem(errors: Sequence[_Error], content_type: str) -> Problem:
    """The answer to a body that does not fit; `errors` are pydantic's, with "body" in front of each place."""
    worst = max(errors, key=_progress)
    param = _readable_loc(worst["loc"]) or None
    if worst["type"] == "json_invalid":
        return Problem(400, f"the body is not valid JSON: {worst['ctx']['error']}", code="invalid_json")
    if worst["type"] == "extra_forbidden":
        return Problem(400, f"unknown field {param!r}", param=param, code="unsupported_parameter")
    if worst["type"] in _OWN_CODES:
        return Problem(400, worst["msg"], param=worst["ctx"]["name"], code=_OWN_CODES[worst["type"]])
    if param is None:
        return _body_problem(worst["type"], content_type)
    if worst["type"] in ("missing", "union_tag_not_found"):
        param = param if worst["type"] == "missing" else f"{param}.role"
        return Problem(400, f"{param} is missing", param=param, code="missing_required_parameter")
    alternatives = [error for error in errors if _readable_loc(error["loc"]) == param]
    return _value_problem(param, worst, alternatives)


def _progress(error: _Error) -> tuple[bool, int, int]:
    """Of a union's branches, the one that got furthest is the one that was meant: beyond the types, or deep."""
    last = error["loc"][-1]
    return error["type"] not in _TYPES, len(error["loc"]), last if isinstance(last, int) else 0


def _readable_loc(loc: Sequence[int | str]) -> str:
    steps = []
    for before, step in itertools.pairwise(loc):
        is_role = isinstance(before, int) and step in _ROLES
        if isinstance(step, int) or not (is_role or _UNION_BRANCH.match(step)):
            steps.append(str(step))
    return ".".join(steps)


def _body_problem(kind: str, content_type: str) -> Problem:
    if not re.match(r"application/([\w.-]+\+)?json\s*(;|$)", content_type):
        return Problem(415, f"Content-Type must be application/json, got {content_type!r}", code="invalid_content_type")
    if kind == "missing":
        return Problem(400, "the body is empty, it must be a JSON object", code="invalid_json")
    return Problem(400, "the body must be a JSON object", code="invalid_type")


def _value_problem(param: str, worst: _Error, alternatives: Sequence[_Error]) -> Problem:
    """The answer to a field of a wrong type, size or value; `alternatives` are all errors at its place."""
    kind, value, context = worst["type"], worst.get("input"), worst.get("ctx", {})
    code = "invalid_value"
    if kind == "too_short":
        return Problem(400, f"{param} must have at least 1 element, got 0", param=param, code=code)
    if kind == "too_long":
        message = f"{param} must have at most {context['max_length']} elements, got {context['actual_length']}"
        return Problem(400, message, param=param, code=code)
    if kind == "union_tag_invalid":
        param, wanted, value = f"{param}.role", f"one of {context['expected_tags']}", value and value["role"]
    elif kind == "literal_error":
        wanted = context["expected"].replace("False", "false")
    elif kind == "finite_number":
        wanted = "a finite number"
    else:
        code = "invalid_type"
        tried = dict.fromkeys(_TYPES[error["type"]] for error in alternatives if error["type"] in _TYPES)
        wanted = " or ".join(tried) or "valid"
    return Problem(400, f"{param} must be {wanted}{_shown(value)}", param=param, code=code)


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return f", got {json.dumps(value)}"
    is_short = isinstance(value, str | int | float) and len(repr(value)) <= _MAX_SHOWN
    return f", got {value!r}" if is_short else ""
