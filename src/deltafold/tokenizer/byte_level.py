"""The byte-level alphabet of tokenizer.json: one printable character per byte. Used by both vocabulary kinds."""

from __future__ import annotations

from types import MappingProxyType


def _printable_bytes() -> tuple[int, ...]:
    return (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def _alphabet() -> tuple[str, ...]:
    """Index: byte. Printable Latin-1 stands for itself, the other bytes for U+0100 on, in order."""
    printable = frozenset(_printable_bytes())
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_CHARS = _alphabet()
CHAR_BYTES = MappingProxyType({char: byte for byte, char in enumerate(BYTE_CHARS)})


def byte_level_text(token: bytes) -> str:
    """How tokenizer.json writes a token's bytes."""
    return "".join(BYTE_CHARS[byte] for byte in token)


def text_bytes(text: str) -> bytes | None:
    """The bytes a tokenizer.json token stands for, or None if a character is outside the alphabet."""
    values = [CHAR_BYTES.get(char) for char in text]
    return None if None in values else bytes(value for value in values if value is not None)
