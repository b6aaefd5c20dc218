"""Log-probabilities in OpenAI's two shapes: lists side by side (completions) and one object per token (chat).

`TokenTexts` says how a single token is shown; both shapes need it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deltafold import Engine, TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as shown: `text`, and its bytes within a completion's text (None for a control token)."""

    text: str
    data: bytes | None


class TokenTexts:
    """Shows tokens of `engine` one by one, each looked up once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token_id: int) -> TokenText:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> TokenText:
        data = self._engine.token_bytes(token_id)
        if data and not self._engine.decode([token_id]):
            return TokenText(data.decode(errors="replace"), None)
        try:
            return TokenText(data.decode(), data)
        except UnicodeDecodeError:
            # part of a character; OpenAI writes such tokens so, and no two of them look the same
            return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data)


class LegacyLogprobs:
    """The `logprobs` object of completions; keeps the offset into one choice's text from chunk to chunk."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def encode(self, entries: Iterable[TokenLogprob]) -> dict[str, list[Any]]:
        """The object for the next tokens; a token's offset, in characters, is that of the first one it adds to."""
        out = _empty()
        for entry in entries:
            top = {self._texts[best.token_id].text: best.logprob for best in entry.top}
            top[self._texts[entry.token_id].text] = entry.logprob
            self._append(out, entry.token_id, entry.logprob, top)
        return out

    def encode_prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, list[Any]]:
        """The same for an echoed prompt, whose first token has no log-probability."""
        out = _empty()
        for token_id, entry in zip(token_ids, entries, strict=True):
            if entry is None:
                self._append(out, token_id, None, None)
            else:
                for name, values in self.encode([entry]).items():
                    out[name].extend(values)
        return out

    def _append(
        self, out: dict[str, list[Any]], token_id: int, logprob: float | None, top: dict[str, float] | None
    ) -> None:
        shown = self._texts[token_id]
        out["tokens"].append(shown.text)
        out["token_logprobs"].append(logprob)
        out["top_logprobs"].append(top)
        out["text_offset"].append(self._offset)
        self._offset += len(self._decoder.decode(shown.data or b""))


def _empty() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def chat_logprobs(texts: TokenTexts, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of chat, one element per token."""
    content = []
    for entry in entries:
        top = [_chat_entry(texts[best.token_id], best.logprob) for best in entry.top]
        content.append({**_chat_entry(texts[entry.token_id], entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_entry(shown: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": shown.text, "logprob": logprob, "bytes": None if shown.data is None else list(shown.data)}
