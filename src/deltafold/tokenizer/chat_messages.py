"""Checks on chat messages and tools: what comes out are plain values that a chat template may see.

`chat_template.py` renders them; `placeholders.py` keeps their text from becoming control tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deltafold.errors import RequestError, UnsupportedOptionError

ROLES = ("system", "user", "assistant", "tool")
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
MAX_DEPTH = 32
"""Deepest nesting of a tool's schema or a tool call's arguments."""


def check_text(text: object, where: str, *, param: str | None = None) -> str:
    """Return `text` if it is a string of whole characters.

    Raises:
        RequestError: it is no string, or has a lone surrogate, which no UTF-8 text has.
    """
    if not isinstance(text, str):
        raise RequestError(f"{where} must be a string, got {text!r}", param=param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = ord(text[error.start])
        raise RequestError(
            f"{where} has a lone surrogate U+{found:04X} at character {error.start}", param=param
        ) from error
    return text


def plain_value(value: object, where: str, *, param: str, depth: int = 0) -> Any:
    """A copy made of JSON's own types, so that a template can reach nothing else.

    Raises:
        RequestError: naming what is not JSON or nested deeper than `MAX_DEPTH`.
    """
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} is nested deeper than {MAX_DEPTH} levels", param=param)
    if isinstance(value, str):
        return check_text(value, where, param=param)
    if isinstance(value, Mapping):
        return {
            check_text(key, f"a key of {where}", param=param): plain_value(
                item, f"{where}.{key}", param=param, depth=depth + 1
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            plain_value(item, f"{where}[{index}]", param=param, depth=depth + 1) for index, item in enumerate(value)
        ]
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise RequestError(f"{where} must be a JSON value, got {value!r}", param=param)


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return check_text(content, where, param="messages")
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where} must be a string or a list of text parts, got {content!r}", param="messages")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is None:
            raise RequestError(f"{where}[{index}] must be an object with a type, got {part!r}", param="messages")
        if kind != "text":
            raise UnsupportedOptionError(
                f"{where}[{index}] has type {kind!r}, only 'text' is supported", param="messages"
            )
        if unknown := sorted(map(str, part.keys() - {"type", "text"})):
            raise UnsupportedOptionError(f"{where}[{index}] has unknown fields {unknown}", param="messages")
        texts.append(check_text(part.get("text"), f"{where}[{index}].text", param="messages"))
    return "".join(texts)


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content, got {message!r}", param="messages")
    if unknown := sorted(map(str, message.keys() - set(FIELDS))):
        raise UnsupportedOptionError(
            f"{where} has unknown fields {unknown}, known are {list(FIELDS)}", param="messages"
        )
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {list(ROLES)}, got {role!r}", param="messages")
    checked: dict[str, Any] = {"role": role}
    if message.get("content") is not None or not (role == "assistant" and message.get("tool_calls")):
        checked["content"] = _content(message.get("content"), f"{where}.content")
    else:
        checked["content"] = ""
    for field in ("name", "tool_call_id", "reasoning_content"):
        if message.get(field) is not None:
            checked[field] = check_text(message[field], f"{where}.{field}", param="messages")
    if message.get("tool_calls"):
        checked["tool_calls"] = _objects(message["tool_calls"], f"{where}.tool_calls", param="messages")
    return checked


def _objects(value: object, where: str, *, param: str) -> list[dict[str, Any]]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise RequestError(f"{where} must be a list of objects, got {value!r}", param=param)
    for index, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise RequestError(f"{where}[{index}] must be an object, got {item!r}", param=param)
    return [plain_value(item, f"{where}[{index}]", param=param) for index, item in enumerate(value)]


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Plain messages: role, content as one string (text parts joined), and what else was given.

    Raises:
        RequestError: naming the message and field; `UnsupportedOptionError` for unknown fields and part types.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of messages, got {messages!r}", param="messages")
    if not messages:
        raise RequestError("messages is empty, at least one message is needed", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_tools(tools: object) -> list[dict[str, Any]] | None:
    """Plain tool schemas, or None if there are none.

    Raises:
        RequestError: naming the tool and value.
    """
    return None if tools is None else _objects(tools, "tools", param="tools") or None
