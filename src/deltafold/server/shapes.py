"""OpenAI's response objects: how completions and chat show whole answers and the chunks of a stream.

A shape belongs to one call and keeps what its choices need from chunk to chunk; `calls.py` drives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from deltafold import Completion, FinishReason, TokenOutput, Usage
from deltafold.server.logprobs import LegacyLogprobs, TokenTexts, chat_logprobs

Choice = dict[str, Any]
"""One element of `choices`."""


class Shape(Protocol):
    """What a call needs to know of its answer's form."""

    id_prefix: str
    object: str
    chunk_object: str
    is_scoring: bool

    def openings(self, index: int) -> Iterator[Choice]:
        """What the stream of choice `index` begins with."""

    def increments(self, index: int, output: TokenOutput) -> Iterator[Choice]:
        """The chunks that show `output`."""

    def choice(self, index: int, completion: Completion) -> Choice:
        """A finished choice."""


class CompletionShape:
    """Text completions. `echoes` are the prompts' texts, or None without echo; each has `n` choices."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, texts: TokenTexts, *, n: int, echoes: Sequence[str] | None, is_scoring: bool) -> None:
        self._texts = texts
        self._n = n
        self._echoes = echoes
        self._logprobs: dict[int, LegacyLogprobs] = {}
        self.is_scoring = is_scoring

    def openings(self, index: int) -> Iterator[Choice]:
        if self._echoes is not None:
            yield _text_choice(index, self._echoes[index // self._n], None, None)

    def increments(self, index: int, output: TokenOutput) -> Iterator[Choice]:
        reason = output.finish_reason
        if self.is_scoring:
            if reason is not None:
                yield _text_choice(index, "", None, FinishReason.LENGTH)
            return
        logprobs = None
        if output.logprobs is not None:
            encoder = self._logprobs.setdefault(index, LegacyLogprobs(self._texts))
            logprobs = encoder.encode(output.logprobs)
        if output.text or output.logprobs or reason is not None:
            yield _text_choice(index, output.text, logprobs, reason)

    def choice(self, index: int, completion: Completion) -> Choice:
        encoder, logprobs = LegacyLogprobs(self._texts), None
        text, reason = completion.text, completion.finish_reason
        entries = completion.logprobs
        if self.is_scoring:
            text, reason, entries = "", FinishReason.LENGTH, () if entries is not None else None
        if completion.prompt_logprobs is not None:
            logprobs = encoder.encode_prompt(completion.prompt_token_ids, completion.prompt_logprobs)
        if entries is not None:
            generated = encoder.encode(entries)
            logprobs = {name: (logprobs or {}).get(name, []) + values for name, values in generated.items()}
        echo = self._echoes[index // self._n] if self._echoes is not None else ""
        return _text_choice(index, echo + text, logprobs, reason)


def _text_choice(index: int, text: str, logprobs: Any, reason: FinishReason | None) -> Choice:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class ChatShape:
    """Chat answers by the assistant."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    is_scoring = False

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def openings(self, index: int) -> Iterator[Choice]:
        yield _delta_choice(index, {"role": "assistant", "content": ""}, None, None)

    def increments(self, index: int, output: TokenOutput) -> Iterator[Choice]:
        logprobs = None if output.logprobs is None else chat_logprobs(self._texts, output.logprobs)
        if output.text or output.logprobs:
            yield _delta_choice(index, {"content": output.text}, logprobs, None)
        if output.finish_reason is not None:
            yield _delta_choice(index, {}, None, output.finish_reason)

    def choice(self, index: int, completion: Completion) -> Choice:
        logprobs = None if completion.logprobs is None else chat_logprobs(self._texts, completion.logprobs)
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": completion.finish_reason}


def _delta_choice(index: int, delta: dict[str, str], logprobs: Any, reason: FinishReason | None) -> Choice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def usage_object(usages: Mapping[int, Usage], *, n: int, is_scoring: bool) -> dict[str, Any]:
    """OpenAI's `usage` of a call, from its choices' by index: the `n` choices of one prompt share its tokens."""
    firsts = [usage for index, usage in usages.items() if index % n == 0]
    num_prompt_tokens = sum(usage.num_prompt_tokens for usage in firsts)
    num_output_tokens = 0 if is_scoring else sum(usage.num_output_tokens for usage in usages.values())
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in firsts)},
    }
