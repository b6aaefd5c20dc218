"""Incremental detokenization of one completion: bytes -> characters -> text that no stop string can take back.

`tokenizer.py` makes one per completion. Both stages keep constant state per token, however long the text gets.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence


class StopMatcher:
    """Finds the stop string that is completed first, character by character (an Aho-Corasick automaton).

    Where several end on the same character the longest wins. Because it goes by characters, the cut does not
    depend on how the text was split into tokens.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        self._found: list[str | None] = [None]
        self._node = 0
        for text in stop:
            self._insert(text)
        self._link()

    def _insert(self, text: str) -> None:
        node = 0
        for char in text:
            if char not in self._children[node]:
                self._children[node][char] = len(self._children)
                self._children.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[node] + 1)
                self._found.append(None)
            node = self._children[node][char]
        self._found[node] = text

    def _link(self) -> None:
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._children[node].items():
                self._fallback[child] = self._step(self._fallback[node], char)
                if self._found[child] is None:
                    self._found[child] = self._found[self._fallback[child]]
                queue.append(child)

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(char, 0)

    def advance(self, char: str) -> str | None:
        """Take one character; the stop string it completes, or None."""
        self._node = self._step(self._node, char)
        return self._found[self._node]

    @property
    def num_held(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return self._depth[self._node]


class Detokenizer:
    """Text of one completion, as it becomes certain.

    Args:
        text_bytes: the bytes a token id adds to the text (none for a hidden one); raises `InvalidTokenError`.
        stop: strings that end the text and are not part of it.
        pending: bytes of a character that the prompt began and the completion may finish (at most 3).
    """

    def __init__(self, text_bytes: Callable[[int], bytes], *, stop: Sequence[str] = (), pending: bytes = b"") -> None:
        self.stop_string: str | None = None
        self._text_bytes = text_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(pending)
        self._matcher = StopMatcher(stop) if stop else None
        self._held: deque[str] = deque()
        self._is_empty = True

    def push(self, token_id: int) -> str:
        """Add one token; the text that is now certain: whole characters, no part of a possible stop string.

        Raises:
            InvalidTokenError: the id is outside the vocabulary.
        """
        data = self._text_bytes(token_id)
        if self.stop_string is not None or not data:
            return ""
        self._is_empty = False
        return self._release(self._decoder.decode(data))

    def flush(self) -> str:
        """At the end: what was held back. A character that was never completed becomes U+FFFD."""
        if self.stop_string is not None or self._is_empty:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        if self.stop_string is not None:
            return text
        text += "".join(self._held)
        self._held.clear()
        return text

    def _release(self, text: str) -> str:
        if self._matcher is None:
            return text
        certain: list[str] = []
        for char in text:
            self._held.append(char)
            self.stop_string = self._matcher.advance(char)
            num_held = self._matcher.num_held if self.stop_string is None else len(self.stop_string)
            while len(self._held) > num_held:
                certain.append(self._held.popleft())
            if self.stop_string is not None:
                self._held.clear()
                break
        return "".join(certain)
