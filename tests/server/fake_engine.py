"""An engine without a model, for what needs exact control of steps and failures: tokens are bytes, the answer is fixed.

It honours the public surface that the server uses; `step()` gives every running completion one token.
"""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import itertools
from dataclasses import dataclass, field

from deltafold import (
    Completion,
    ContextLengthError,
    EngineClosedError,
    EngineStats,
    FinishReason,
    InvalidTokenError,
    NumericalError,
    QueueFullError,
    RequestError,
    SamplingParams,
    TokenLogprob,
    TokenOutput,
    TopLogprob,
    Usage,
)

END = 256
VOCAB_SIZE = 260
NUM_BLOCKS = 32
REPLY = "Grüße, 世界! That is all."


@dataclass
class Running:
    """One completion: what it will say, and its queue of increments."""

    request_id: str
    index: int
    prompt: list[int]
    params: SamplingParams
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    queue: asyncio.Queue
    num_given: int = 0
    num_characters: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt), self.num_given, 0)


class Stream:
    """Increments of all completions of one request."""

    def __init__(self, engine: FakeEngine, request_id: str, runnings: list[Running], queue: asyncio.Queue) -> None:
        self.engine, self.request_id, self.queue = engine, request_id, queue
        self.num_unfinished = len(runnings)
        self.failure: Exception | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> TokenOutput:
        if outputs := await self.take(1):
            return outputs[0]
        raise StopAsyncIteration

    async def take(self, max_outputs: int) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        while self.failure is None and self.num_unfinished and len(outputs) < max_outputs:
            if outputs and self.queue.empty():
                break
            item = await self.queue.get()
            if isinstance(item, Exception):
                self.failure = item
            else:
                outputs.append(item)
                self.num_unfinished -= item.finish_reason is not None
        if self.failure is not None and not outputs:
            self.num_unfinished = 0
            raise self.failure
        return outputs


class FakeEngine:
    """`is_stepping`: step by itself whenever something runs; otherwise the test calls `step()`."""

    model_name = "fake"
    vocab_size = VOCAB_SIZE

    def __init__(self, *, reply: str = REPLY, max_model_len: int = 256, max_waiting: int | None = None,
                 is_stepping: bool = True) -> None:  # fmt: skip
        self.reply = reply.encode()
        self.max_model_len = max_model_len
        self.max_waiting = max_waiting
        self.is_stepping = is_stepping
        self.is_alive = True
        self.running: list[Running] = []
        self.num_steps = 0
        self.num_output_tokens = 0
        self.aborted: list[str] = []
        self.submitted: list[SamplingParams] = []
        self.logprob = -0.5
        self._stepper: asyncio.Task | None = None
        self._ids = itertools.count()

    def encode(self, text: str) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(f"text has a lone surrogate at {error.start}", param="prompt") from error

    def token_bytes(self, token_id: int) -> bytes:
        self._check_id(token_id)
        return bytes([token_id]) if token_id < 256 else f"<|control_{token_id}|>".encode()

    def decode(self, token_ids, *, skip_special_tokens: bool = True) -> str:
        shown = [t for t in token_ids if self._check_id(t) or t < 256 or not skip_special_tokens]
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def chat_token_ids(self, messages, *, add_generation_prompt: bool = True, tools=None) -> list[int]:
        if messages[-1]["role"] == "system":
            raise RequestError("the last message must not be the system's", param="messages")
        return [257, *itertools.chain.from_iterable(self.encode(str(m.get("content"))) for m in messages)]

    def astream(self, prompt, params=None, *, request_id=None) -> Stream:
        request_id = request_id or f"r{next(self._ids)}"
        runnings, queue = self._submit([prompt], params or SamplingParams(), request_id)
        return Stream(self, request_id, runnings, queue)

    async def acomplete(self, prompts, params=None, *, request_id=None) -> list[Completion]:
        params = params or SamplingParams()
        request_id = request_id or f"r{next(self._ids)}"
        runnings, queue = self._submit(prompts, params, request_id)
        stream = Stream(self, request_id, runnings, queue)
        try:
            reasons = {output.index: output.finish_reason async for output in stream if output.finish_reason}
        except asyncio.CancelledError:
            self.abort(request_id)
            raise
        return [self._completion(running, reasons[running.index]) for running in runnings]

    def abort(self, request_id: str) -> bool:
        hit = [running for running in self.running if running.request_id == request_id]
        for running in hit:
            self.running.remove(running)
            running.queue.put_nowait(
                TokenOutput(request_id, running.index, "", (), None, FinishReason.ABORT, running.usage)
            )
            self.aborted.append(request_id)
        return bool(hit)

    def stats(self) -> EngineStats:
        used = len(self.running)
        known = {
            "num_running": used, "num_blocks": NUM_BLOCKS, "num_free_blocks": NUM_BLOCKS - used - 1,
            "num_cached_blocks": 1, "num_state_slots": 8, "num_free_state_slots": 8 - used,
            "num_output_tokens": self.num_output_tokens, "num_steps": self.num_steps,
        }  # fmt: skip
        return EngineStats(**dict.fromkeys((field.name for field in dataclasses.fields(EngineStats)), 0) | known)

    def step(self) -> None:
        """One token for each that runs."""
        self.num_steps += 1
        for running in list(self.running):
            self._advance(running)

    def fail(self, error: Exception) -> None:
        """Every running request ends with `error`; an EngineClosedError is the engine's own death."""
        self.is_alive = self.is_alive and not isinstance(error, EngineClosedError)
        for running in self.running:
            running.queue.put_nowait(error)
        self.running.clear()

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < VOCAB_SIZE:
            raise InvalidTokenError(f"token ids are 0..{VOCAB_SIZE - 1}, got {token_id}", param="prompt")

    def _submit(self, prompts, params: SamplingParams, request_id: str) -> tuple[list[Running], asyncio.Queue]:
        if not self.is_alive:
            raise EngineClosedError("the engine died")
        for prompt in prompts:
            if not prompt:
                raise RequestError("the prompt is empty", param="prompt")
            for token_id in prompt:
                self._check_id(token_id)
            if (wanted := len(prompt) + (params.max_tokens or 1)) > self.max_model_len:
                raise ContextLengthError(f"{wanted} tokens, max_model_len is {self.max_model_len}", param="max_tokens")
        self.submitted.append(params)
        num = len(prompts) * params.n
        if self.max_waiting is not None and len(self.running) + num > self.max_waiting:
            raise QueueFullError(f"max_waiting is {self.max_waiting}")
        queue: asyncio.Queue = asyncio.Queue()
        runnings = [
            self._make(request_id, index, list(prompts[index // params.n]), params, queue) for index in range(num)
        ]
        self.running += runnings
        if self.is_stepping and (self._stepper is None or self._stepper.done()):
            self._stepper = asyncio.ensure_future(self._step_on())
        return runnings, queue

    async def _step_on(self) -> None:
        while self.running:
            self.step()
            await asyncio.sleep(0)

    def _make(self, request_id, index, prompt, params, queue) -> Running:
        reply = [*self.reply, END]
        text, reason = self.reply.decode(), FinishReason.STOP
        found = [text.index(stop) + len(stop) for stop in params.stop if stop in text]
        if found:
            reply = list(text[: min(found)].encode())
            text = text[: min(text.index(stop) for stop in params.stop if stop in text)]
        limit = min(params.max_tokens or self.max_model_len, self.max_model_len - len(prompt))
        if limit < len(reply):
            reply, reason = reply[:limit], FinishReason.LENGTH
            text = bytes(t for t in reply if t < 256).decode("utf-8", "replace")
        return Running(request_id, index, prompt, params, reply, text, reason, queue)

    def _advance(self, running: Running) -> None:
        token_id = running.token_ids[running.num_given]
        running.num_given += 1
        self.num_output_tokens += 1
        is_last = running.num_given == len(running.token_ids)
        data = bytes([token_id]) if token_id < 256 else b""
        decoded = running.decoder.decode(data, final=is_last)
        text = running.text[running.num_characters :][: len(decoded)]
        running.num_characters += len(decoded)
        logprobs = (self._entry(token_id, running.params.logprobs),) if running.params.logprobs is not None else None
        reason, usage = (running.finish_reason, running.usage) if is_last else (None, None)
        if is_last:
            self.running.remove(running)
        running.queue.put_nowait(
            TokenOutput(running.request_id, running.index, text, (token_id,), logprobs, reason, usage)
        )

    def _entry(self, token_id: int, num_top: int) -> TokenLogprob:
        top = tuple(TopLogprob((token_id + i) % 256, self.logprob - i) for i in range(num_top))
        return TokenLogprob(token_id, self.logprob, 1, top)

    def _completion(self, running: Running, reason: FinishReason) -> Completion:
        num, params = running.num_given, running.params
        token_ids = tuple(running.token_ids[:num])
        k, p = params.logprobs, params.prompt_logprobs
        prompt_entries = [None, *(self._entry(t, p) for t in running.prompt[1:])] if p is not None else None
        return Completion(
            request_id=running.request_id, index=running.index % params.n, text=running.text[: running.num_characters],
            prompt_token_ids=tuple(running.prompt), token_ids=token_ids, finish_reason=reason, usage=running.usage,
            logprobs=None if k is None else tuple(self._entry(t, k) for t in token_ids),
            prompt_logprobs=None if prompt_entries is None else tuple(prompt_entries),
        )  # fmt: skip


def numerical_error() -> NumericalError:
    return NumericalError("logits of token 3 are not finite")
