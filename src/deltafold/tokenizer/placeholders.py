"""Keeps user text from becoming control tokens on its way through a chat template.

Before rendering, the characters by which a control token could begin in (or run into) user text are exchanged for
private ones that occur nowhere else; after the rendered text was split at control tokens they are put back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

PRIVATE_CHARS = range(0xF0000, 0xFFFFE)
"""Characters without a meaning (Unicode plane 15): no filter of a template changes, strips or splits at them."""

STRUCTURE_WORDS = frozenset(
    (
        *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "id", "type", "function"),
        *("arguments", "description", "parameters", "properties", "required", "items", "enum", "default", "anyOf"),
        *("oneOf", "allOf", "object", "array", "string", "number", "integer", "boolean", "null"),
    )
)
"""Keys, and values of `type`, that templates ask for by name: they are the format's own words, not a user's."""


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


class Placeholders:
    """Placeholders of one rendering: one character for one, so that lengths and slices stay what they were.

    Args:
        names: texts of the control tokens.
        values: all user values of the rendering (plain JSON values); placeholders occur in none of them.
    """

    def __init__(self, names: Collection[str], values: Any) -> None:
        self._names = tuple(names)
        used = set().union(*map(set, _strings(values)))
        self._free = (point for point in PRIVATE_CHARS if chr(point) not in used)
        self._original: dict[int, int] = {}
        self._placeholder: dict[int, int] = {}
        self._initials = {ord(name[0]): self._allocate(name[0]) for name in self._names}

    def hide(self, value: Any) -> Any:
        """A copy of a plain value with its strings, dict keys included, made harmless."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, dict):
            return dict(self._hide_item(key, item) for key, item in value.items())
        return [self.hide(item) for item in value] if isinstance(value, list) else value

    def _hide_item(self, key: str, item: Any) -> tuple[str, Any]:
        is_word = key == "type" and isinstance(item, str) and item in STRUCTURE_WORDS
        return key if key in STRUCTURE_WORDS else self._hide_text(key), item if is_word else self.hide(item)

    def restore(self, text: str) -> str:
        """Put the characters back."""
        return text.translate(self._original)

    def _allocate(self, char: str) -> int:
        point = self._placeholder.get(ord(char))
        if point is None:
            point = self._placeholder[ord(char)] = next(self._free)
            self._original[point] = ord(char)
        return point

    def _hide_text(self, text: str) -> str:
        core = text.lstrip()
        if core and self._can_continue(core):
            lead = text[: len(text) - len(core)]
            return lead + chr(self._allocate(core[0])) + core[1:].translate(self._initials)
        return text.translate(self._initials)

    def _can_continue(self, core: str) -> bool:
        """Whether template text before (and after) this text could make it part of a control token."""
        inner = core.rstrip()
        return any(
            name.find(inner, 1) > 0 or any(core.startswith(name[cut:]) for cut in range(1, len(name)))
            for name in self._names
        )
