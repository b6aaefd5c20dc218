"""Server-sent events as text: the JSON that a stream's chunks have in common is encoded once, around their text.

`calls.py` sends what `Frames` makes of the choices that shapes.py describes.
"""

from __future__ import annotations

import json
from typing import Any

from deltafold import TokenOutput
from deltafold.server.shapes import Choice, Shape

# a NaN that came this far is a defect, and clients could not parse it
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False)
_MARK = "text goes here"


def encode(value: Any) -> str:
    """Compact JSON in ASCII; ValueError for what is not finite."""
    return _ENCODER.encode(value)


class Frames:
    """The events of one stream. `head` has the fields of every chunk; `has_usage` adds null counts to each."""

    def __init__(self, shape: Shape, head: dict[str, Any], *, has_usage: bool) -> None:
        self._shape = shape
        self._before = "data: " + encode(head)[:-1] + ',"choices":['
        self._after = '],"usage":null}\n\n' if has_usage else "]}\n\n"
        self._around: dict[int, tuple[str, str]] = {}  # choice -> what stands before and after its text

    def openings(self, index: int) -> str:
        """What the stream of choice `index` begins with."""
        return "".join([self._event(choice) for choice in self._shape.openings(index)])

    def increment(self, index: int, output: TokenOutput) -> str:
        """The events that show `output`; none if it has nothing to show."""
        if output.logprobs is not None or output.finish_reason is not None or self._shape.is_scoring:
            return "".join([self._event(choice) for choice in self._shape.increments(index, output)])
        if not output.text:
            return ""
        around = self._around.get(index)
        if around is None:
            around = self._around[index] = self._surround(index)
        return around[0] + encode(output.text) + around[1]

    def usage(self, usage: dict[str, int]) -> str:
        """The event of the token counts."""
        return self._before + '],"usage":' + encode(usage) + "}\n\n"

    def _event(self, choice: Choice) -> str:
        return self._before + encode(choice) + self._after

    def _surround(self, index: int) -> tuple[str, str]:
        marked = TokenOutput(request_id="", index=index, text=_MARK, token_ids=())
        (choice,) = self._shape.increments(index, marked)
        before, _, after = self._event(choice).rpartition(encode(_MARK))
        return before, after
