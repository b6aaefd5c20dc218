"""The tokenizer of a model: text and chats to ids, ids to text. The engine and the tools use this door only.

`vocabulary.py` reads the files, `chat_template.py` renders chats, `detokenizer.py` streams text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deltafold.errors import InvalidTokenError, RequestError
from deltafold.tokenizer.chat_messages import check_messages, check_text, check_tools
from deltafold.tokenizer.chat_template import ChatTemplate
from deltafold.tokenizer.detokenizer import Detokenizer
from deltafold.tokenizer.placeholders import Placeholders
from deltafold.tokenizer.special_tokens import read_end_token_ids
from deltafold.tokenizer.vocabulary import Vocabulary, read_vocabulary

MAX_CHAR_BYTES = 4


def _sorted_by_key(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_by_key(item) for key, item in sorted(value.items())}
    return [_sorted_by_key(item) for item in value] if isinstance(value, list) else value


class Tokenizer:
    """Made by `from_folder`. Immutable; safe to share between threads.

    Attributes:
        vocab_size: ids are `0 .. vocab_size - 1`.
        special_tokens: control tokens by name, from the checkpoint's own table.
        end_token_ids: ids that end an answer.
    """

    def __init__(self, vocabulary: Vocabulary, *, end_token_ids: frozenset[int], chat_template: ChatTemplate) -> None:
        self.vocab_size = len(vocabulary.tokens)
        self.special_tokens: Mapping[str, int] = MappingProxyType(dict(vocabulary.special.ids))
        self.end_token_ids = end_token_ids
        self._vocabulary = vocabulary
        # A config may name an end token that the table does not flag special; it is no text either.
        self._hidden = vocabulary.special.hidden | end_token_ids
        self._chat_template = chat_template
        # The longest name first, so that none is taken for a shorter one it begins with.
        names = sorted(self.special_tokens, key=len, reverse=True)
        self._control_tokens = re.compile("|".join(map(re.escape, names))) if names else re.compile(r"(?!)")

    @classmethod
    def from_folder(cls, folder: Path, *, vocab_size: int) -> Tokenizer:
        """Read tokenizer.json if there, else tiktoken.model. `vocab_size`: the model's embedding rows.

        Raises:
            TokenizerError: naming the file and value that is missing or malformed.
        """
        vocabulary = read_vocabulary(folder, vocab_size=vocab_size)
        ends = read_end_token_ids(folder, vocabulary.token_ids, vocab_size=vocab_size)
        return cls(vocabulary, end_token_ids=ends, chat_template=ChatTemplate(folder))

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text. The name of a control token in it is text like any other.

        Raises:
            RequestError: `text` is no string or has a lone surrogate.
        """
        return self._vocabulary.encode(check_text(text, "text"))

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; those of a control or reserved token spell its name.

        Raises:
            InvalidTokenError: the id is outside the vocabulary.
        """
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self.vocab_size:
            raise InvalidTokenError(f"token ids are 0..{self.vocab_size - 1}, got {token_id!r}")
        return self._vocabulary.tokens[token_id]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of any ids; bytes that are no UTF-8 become U+FFFD.

        Args:
            skip_special_tokens: leave out end tokens, tokens flagged special and reserved ids without a name. Marks
                that the table does not flag (Kimi's tool-call marks) are text in either case.

        Raises:
            InvalidTokenError: an id is outside the vocabulary.
        """
        as_bytes = self._visible_bytes if skip_special_tokens else self.token_bytes
        return b"".join(map(as_bytes, token_ids)).decode("utf-8", errors="replace")

    def detokenizer(self, *, stop: Sequence[str] = (), prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """An incremental `decode` (without special tokens) for one completion.

        Args:
            stop: strings that end the text.
            prompt_token_ids: if they end inside a character, the completion can finish it; that character then
                belongs to the completion's text.
        """
        pending = self._unfinished_character(prompt_token_ids)
        return Detokenizer(self._visible_bytes, stop=stop, pending=pending)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """A chat's text as the model's template writes it, for display: `encode_chat` alone tells control tokens
        from message text that spells their names. Arguments and errors as there."""
        rendered, placeholders = self._render(messages, add_generation_prompt, tools)
        return placeholders.restore(rendered)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> list[int]:
        """Ids of a chat. Control tokens come from the template alone, never from a message's or a tool's text.

        Args:
            messages: each with `role` and `content` (a string or a list of text parts), and where they apply
                `name`, `tool_calls`, `tool_call_id`, `reasoning_content`.
            add_generation_prompt: end with the beginning of the assistant's answer.
            tools: JSON schemas of the tools the model may call.

        Raises:
            RequestError: a message or tool is malformed, or the template refuses it.
            TokenizerError: the folder has no template, or a bad one.
        """
        rendered, placeholders = self._render(messages, add_generation_prompt, tools)
        token_ids: list[int] = []
        start = 0
        for match in self._control_tokens.finditer(rendered):
            token_ids += self._vocabulary.encode(placeholders.restore(rendered[start : match.start()]))
            token_ids.append(self.special_tokens[match[0]])
            start = match.end()
        return token_ids + self._vocabulary.encode(placeholders.restore(rendered[start:]))

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None,
    ) -> tuple[str, Placeholders]:
        if not isinstance(add_generation_prompt, bool):
            raise RequestError(f"add_generation_prompt must be a boolean, got {add_generation_prompt!r}")
        plain_messages, plain_tools = check_messages(messages), check_tools(tools)
        if self._vocabulary.is_kimi:  # its wrapper sorts them, which the model was trained on
            plain_tools = _sorted_by_key(plain_tools)
        placeholders = Placeholders(self.special_tokens, [plain_messages, plain_tools])
        hidden = [{**placeholders.hide(message), "role": message["role"]} for message in plain_messages]
        rendered = self._chat_template.render(
            hidden, tools=placeholders.hide(plain_tools), add_generation_prompt=add_generation_prompt
        )
        return rendered, placeholders

    def _visible_bytes(self, token_id: int) -> bytes:
        data = self.token_bytes(token_id)
        return b"" if token_id in self._hidden else data

    def _unfinished_character(self, token_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(token_ids):
            tail = self._visible_bytes(token_id) + tail
            if len(tail) >= MAX_CHAR_BYTES:
                break
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(tail)
        return bytes(decoder.getstate()[0])
