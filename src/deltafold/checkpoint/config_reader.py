"""Typed reads of one JSON object: every value is checked for type and limit, and every key must be accounted for.

Neighbours: `config.py` turns what is read here into a `ModelConfig`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Final, TypeVar, overload

from deltafold.errors import ConfigError

MAX_INT: Final = 2**31 - 1
"""Largest integer a key may have unless it has a smaller limit; shapes stay within what an int64 product holds."""

_MAX_SHOWN = 200
_D = TypeVar("_D")


class _Required(enum.Enum):
    REQUIRED = enum.auto()


_REQUIRED: Final = _Required.REQUIRED


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


class ConfigReader:
    """One object of a configuration file; null counts as absent, as the format has it.

    Every read takes one or more spellings of a key, the first being the one that errors name. Reads raise
    `ConfigError` with the key's path, its value and the limit. `refuse_unread` ends the reading.
    """

    def __init__(self, raw: Mapping[str, object], *, prefix: str = "", file: str = "config.json") -> None:
        self.raw = raw
        self._prefix = prefix
        self._file = file
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def error(self, key: str, value: object, limit: str) -> ConfigError:
        """The error that `key` has `value` (None: is missing) where `limit` holds."""
        what = "is missing" if value is None else f"= {_shown(value)}"
        return ConfigError(f"{self._file}: {self._prefix}{key} {what}: {limit}")

    def section(self, key: str) -> ConfigReader | None:
        """The object under `key`, or None if it is absent."""
        value = self._value((key,))
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, value, "must be an object")
        return ConfigReader(value, prefix=f"{self._prefix}{key}.", file=self._file)

    @overload
    def integer(self, *keys: str, minimum: int = ..., maximum: int = ...) -> int: ...
    @overload
    def integer(self, *keys: str, minimum: int = ..., maximum: int = ..., default: _D) -> int | _D: ...
    def integer(self, *keys: str, minimum: int = 1, maximum: int = MAX_INT, default: object = _REQUIRED) -> object:
        """An integer (true and 8.0 are not) in `minimum .. maximum`."""
        value = self._value(keys)
        if value is None:
            return self._default(keys, default, "an integer")
        return self._checked_int(keys[0], value, minimum, maximum)

    @overload
    def number(self, *keys: str, positive: bool) -> float: ...
    @overload
    def number(self, *keys: str, positive: bool, default: _D) -> float | _D: ...
    def number(self, *keys: str, positive: bool, default: object = _REQUIRED) -> object:
        """A finite number, integers included; above zero if `positive`."""
        value = self._value(keys)
        if value is None:
            return self._default(keys, default, "a number")
        limit = "must be a finite number" + (" above 0" if positive else "")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(keys[0], value, limit)
        if abs(value) > MAX_INT or math.isnan(value) or (positive and value <= 0):
            raise self.error(keys[0], value, f"{limit}, of magnitude <= {MAX_INT}")
        return float(value)

    @overload
    def boolean(self, *keys: str) -> bool: ...
    @overload
    def boolean(self, *keys: str, default: _D) -> bool | _D: ...
    def boolean(self, *keys: str, default: object = _REQUIRED) -> object:
        """true or false."""
        value = self._value(keys)
        if value is None:
            return self._default(keys, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(keys[0], value, "must be true or false")
        return value

    @overload
    def string(self, *keys: str) -> str: ...
    @overload
    def string(self, *keys: str, default: _D) -> str | _D: ...
    def string(self, *keys: str, default: object = _REQUIRED) -> object:
        """A string."""
        value = self._value(keys)
        if value is None:
            return self._default(keys, default, "a string")
        if not isinstance(value, str):
            raise self.error(keys[0], value, "must be a string")
        return value

    @overload
    def strings(self, key: str) -> tuple[str, ...]: ...
    @overload
    def strings(self, key: str, *, default: _D) -> tuple[str, ...] | _D: ...
    def strings(self, key: str, *, default: object = _REQUIRED) -> object:
        """A list of strings."""
        value = self._value((key,))
        if value is None:
            return self._default((key,), default, "a list of strings")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, value, "must be a list of strings")
        return tuple(value)

    @overload
    def integers(self, key: str) -> tuple[int, ...]: ...
    @overload
    def integers(self, key: str, *, default: _D) -> tuple[int, ...] | _D: ...
    def integers(self, key: str, *, default: object = _REQUIRED) -> object:
        """A list of integers, each within +-MAX_INT."""
        value = self._value((key,))
        if value is None and default is not _REQUIRED:
            return default
        if not isinstance(value, list):
            raise self.error(key, value, "must be a list of integers")
        return tuple(self._checked_int(key, item, -MAX_INT, MAX_INT) for item in value)

    def token_id(self, key: str, *, vocab_size: int) -> int | None:
        """A token id below `vocab_size`, or None if absent."""
        return self.integer(key, minimum=0, maximum=vocab_size - 1, default=None)

    def token_ids(self, key: str, *, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them, each below `vocab_size`, without repeats; empty if absent."""
        value = self._value((key,))
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        return tuple(dict.fromkeys(self._checked_int(key, item, 0, vocab_size - 1) for item in items))

    def require(self, key: str, expected: str | bool | int | None) -> None:
        """Refuses `key` unless it is absent or `expected`: any other value means another computation."""
        value = self._value((key,))
        if value is not None and (type(value) is not type(expected) or value != expected):
            shown = "null" if expected is None else repr(expected)
            raise self.error(key, value, f"is not supported, only {shown} is")

    def skip(self, *keys: str) -> None:
        """Counts keys as read whatever they say."""
        self._read.update(keys)

    def refuse_unread(self, harmless: frozenset[str]) -> None:
        """Refuses every key that was not read, unless it is in `harmless` or says nothing (null, false or empty)."""
        unknown = [
            key
            for key, value in self.raw.items()
            if key not in self._read
            and key not in harmless
            and not (value is None or value is False or value == "" or value == [] or value == {})
        ]
        if unknown:
            values = ", ".join(f"{self._prefix}{key} = {_shown(self.raw[key])}" for key in unknown)
            raise ConfigError(f"{self._file}: keys that are not supported: {values}")

    def _value(self, keys: tuple[str, ...]) -> object:
        """The value under the spellings `keys`, None if under none; two spellings that differ are refused."""
        self._read.update(keys)
        given = [key for key in keys if key in self]
        for other in given[1:]:
            first, second = self.raw[given[0]], self.raw[other]
            if type(first) is not type(second) or first != second:
                limit = f"contradicts {self._prefix}{other} = {second!r}; they are two names of one value"
                raise self.error(given[0], first, limit)
        return self.raw[given[0]] if given else None

    def _default(self, keys: tuple[str, ...], default: object, kind: str) -> object:
        if default is _REQUIRED:
            also = "".join(f" (or {key})" for key in keys[1:])
            raise self.error(keys[0] + also, None, f"{kind} is required")
        return default

    def _checked_int(self, key: str, value: object, minimum: int, maximum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, "must be an integer")
        if not minimum <= value <= maximum:
            raise self.error(key, value, f"must be in {minimum}..{maximum}")
        return value
