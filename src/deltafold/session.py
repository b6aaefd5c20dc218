"""A conversation whose state outlives its requests, and its file.

A session holds its tokens and, in host memory, the blocks and recurrent state behind them, so that the next call
computes only what is new. `api.py` makes sessions; the scheduler leaves the state behind when a request ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from deltafold.cache.host_store import HostEntry
from deltafold.core import EngineCore, Increment
from deltafold.errors import (
    DeltafoldWarning,
    EngineClosedError,
    QueueFullError,
    RequestError,
    SessionError,
    UnsupportedOptionError,
)
from deltafold.loop import Delivery, EngineLoop
from deltafold.scheduler.request import Request, SavedState
from deltafold.streams import Collector, TokenStream
from deltafold.tokenizer.tokenizer import Tokenizer
from deltafold.types import ChatMessage, Completion, SamplingParams
from deltafold.version import __version__

FORMAT = "deltafold-session-1"
"""Of the file; another value is refused."""


@dataclass(frozen=True, slots=True)
class SessionServices:
    """What a session needs of its engine."""

    loop: EngineLoop
    core: EngineCore
    tokenizer: Tokenizer
    make_request: Callable[[Sequence[int], SamplingParams], Request]
    identity: Callable[[], dict[str, str]]  # what a file must agree with: fingerprint, dtype


class SessionStream(TokenStream):
    """A stream that, at its end, hands the request's tokens and state to its session."""

    def __init__(self, session: Session, request: Request) -> None:
        self._session = session
        self.request = request
        super().__init__(session.services.loop, [request])

    def _accept(self, delivery: Delivery) -> Increment:
        try:
            return super()._accept(delivery)
        finally:
            if self.is_finished:
                self._session.take_over(self.request)

    def abort(self) -> None:
        # The state is handed over with the last increment, so that one is waited for.
        if not self.is_finished:
            self._loop.abort(self._request_id)
        with contextlib.suppress(EngineClosedError):
            while not self.is_finished:
                self.get()

    def __del__(self) -> None:
        # The collector may run this on the engine's own thread, which must not wait for itself: nothing is taken over.
        if hasattr(self, "_num_unfinished") and not self.is_finished:
            self.request.keeps_state = False
            self._session.abandon(self.request)
            self._loop.abort(self._request_id)


class Session:
    """Made by `Engine.session`, `Engine.fork` or `Engine.restore`. One request at a time; not for several threads."""

    def __init__(
        self,
        services: SessionServices,
        *,
        token_ids: Sequence[int] = (),
        messages: Sequence[ChatMessage] = (),
        saved: SavedState | None = None,
    ) -> None:
        """Not public. Takes over one reference to `saved`."""
        self.services = services
        self._token_ids = list(token_ids)
        self._messages = list(messages)
        self._saved = saved
        self._active: Request | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far, prompts and outputs."""
        return tuple(self._token_ids)

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The conversation so far, if it is led with `chat`."""
        return tuple(self._messages)

    @property
    def num_saved_tokens(self) -> int:
        """How many of the tokens need not be computed again."""
        return 0 if self._saved is None else self._saved.num_tokens

    def complete(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Completion:
        """Appends a prompt to the session's tokens and completes it; the output is appended too. The completion's
        `prompt_token_ids` are all tokens before the output. An empty prompt goes on generating."""
        return self._collect(self.stream(prompt, params))

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> SessionStream:
        """`complete`, increment by increment. Closing it early keeps what was computed."""
        new = self.services.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self._start([*self._token_ids, *new], params)

    def chat(self, message: str | ChatMessage, params: SamplingParams | None = None) -> Completion:
        """Appends a message (a string is the user's) to the conversation and answers; the answer is appended too."""
        stream = self.stream_chat(message, params)
        completion = self._collect(stream)
        self.add_answer(completion.text)
        return completion

    def stream_chat(self, message: str | ChatMessage, params: SamplingParams | None = None) -> SessionStream:
        """`chat`, increment by increment; the caller hands the whole answer to `add_answer`."""
        added: ChatMessage = {"role": "user", "content": message} if isinstance(message, str) else message
        messages = [*self._messages, added]
        stream = self._start(self._chat_token_ids(messages), params)
        self._messages = messages
        return stream

    def add_answer(self, text: str) -> None:
        """Appends an assistant's message to the conversation."""
        self._messages.append({"role": "assistant", "content": text})

    def add_message(self, message: ChatMessage) -> None:
        """Appends a message, a system message say, without answering it."""
        self.services.tokenizer.encode_chat([*self._messages, message])
        self._messages.append(message)

    def save(self, path: str | Path) -> None:
        """Writes tokens, blocks, state and conversation to one safetensors file, readable by `Engine.restore` of an
        engine with the same model and dtype. What was there is replaced once all is written.

        Raises:
            SessionError: the file cannot be written.
        """
        self._check_idle()
        tensors = {"token_ids": torch.tensor(self._token_ids, dtype=torch.int64)}
        if self._saved is not None:
            entry = self.services.core.runner.host.entry(self._saved.host_id)
            tensors |= {name: tensor.contiguous() for name, tensor in (entry.state | entry.rows).items()}
        metadata = {
            "format": FORMAT,
            "deltafold": __version__,
            "num_saved_tokens": str(self.num_saved_tokens),
            "messages": json.dumps(self._messages),
            **self.services.identity(),
        }
        metadata["digest"] = _digest(tensors, metadata)
        temporary = Path(path).with_name(Path(path).name + ".partial")
        try:
            save_file(tensors, temporary, metadata=metadata)
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise SessionError(f"{path} cannot be written: {error}") from error

    def close(self) -> None:
        """Gives the host memory back. Idempotent; the tokens stay."""
        self._check_idle()
        saved, self._saved = self._saved, None
        self._release(saved)

    def fork(self) -> Session:
        """A second session with the same past; the two share memory, and neither changes the other."""
        self._check_idle()
        saved = self._saved
        if saved is not None:
            self.services.loop.call(lambda: self.services.core.scheduler.cache.host.retain(saved.host_id))
        return Session(self.services, token_ids=self._token_ids, messages=self._messages, saved=saved)

    def take_over(self, request: Request) -> None:
        """Not public: takes a finished request's tokens and the state it left behind. Once a request."""
        if self._active is not request:
            return
        self._active = None
        self._token_ids = list(request.token_ids)
        left, old = request.saved, self._saved
        request.saved = None
        if left is None:
            return  # no host memory, or the request failed: what was saved before still holds for the first tokens
        self._saved = left
        self._release(old)

    def _release(self, saved: SavedState | None) -> None:
        if saved is not None:
            with contextlib.suppress(EngineClosedError):  # then all its memory is gone
                self.services.loop.call(lambda: self.services.core.scheduler.cache.release_host(saved.host_id))

    def abandon(self, request: Request) -> None:
        """Not public: a stream was dropped unfinished; the session stays at what it was before."""
        if self._active is request:
            self._active = None

    def _start(self, token_ids: Sequence[int], params: SamplingParams | None) -> SessionStream:
        self._check_idle()
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"a session has one future: n must be 1, got {params.n}", param="n")
        if params.prompt_logprobs is not None:
            raise UnsupportedOptionError("a session does not compute its past again: no prompt_logprobs")
        request = self.services.make_request(token_ids, params)
        request.keeps_state = True
        if self._saved is not None and self._continues(token_ids, self._saved.num_tokens):
            request.saved = self._saved
        self._active = request
        try:
            return SessionStream(self, request)
        except (QueueFullError, EngineClosedError):
            self._active = None
            raise

    def _chat_token_ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The prompt of a conversation. Of its past the session's own tokens, if they spell what the template makes
        of it: an answer is seldom written in the tokens that its text would be encoded to, and the state is of them."""
        tokenizer = self.services.tokenizer
        rendered = tokenizer.encode_chat(messages)
        if not self._token_ids or len(messages) < 2:
            return rendered
        past = tokenizer.encode_chat(messages[:-1], add_generation_prompt=False)
        written = tokenizer.decode(self._token_ids, skip_special_tokens=False)
        if rendered[: len(past)] == past:
            for stop in (len(past), len(past) - 1):  # the model may not have come to write the answer's end token
                if tokenizer.decode(past[:stop], skip_special_tokens=False) == written:
                    return [*self._token_ids, *rendered[stop:]]
        return rendered

    def _continues(self, token_ids: Sequence[int], num_saved: int) -> bool:
        """Whether the saved state is of the first of these tokens, and not of all of them."""
        return len(token_ids) > num_saved and list(token_ids[:num_saved]) == self._token_ids[:num_saved]

    def _collect(self, stream: SessionStream) -> Completion:
        collector = Collector([stream.request])
        with stream:
            while not stream.is_finished:
                collector.add(stream.get())
        completion = collector.completions(1)[0]
        if completion.error is not None:
            raise completion.error
        return completion

    def _check_idle(self) -> None:
        if self._active is not None:
            raise RequestError("the session's last stream is not finished; read it to the end or close it")


def restore(services: SessionServices, path: str | Path) -> Session:
    """Reads a session's file.

    Raises:
        SessionError: the file is damaged, or of another format, model or dtype; the message names the field.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise SessionError(f"{path} cannot be read as a session: {error}") from error
    expected = {"format": FORMAT, **services.identity()}
    for name, value in expected.items():
        if metadata.get(name) != value:
            raise SessionError(f"{path}: {name} is {metadata.get(name)!r}, this engine has {value!r}")
    if metadata.pop("digest", None) != _digest(tensors, metadata):
        raise SessionError(f"{path} is damaged: its content does not have the digest it was written with")
    num_saved, messages = int(metadata["num_saved_tokens"]), json.loads(metadata["messages"])
    token_ids = tensors.pop("token_ids").tolist()
    saved = None
    if num_saved:
        entry = _checked_entry(services, path, tensors, num_saved)
        saved = services.loop.call(lambda: _adopt(services, entry, num_saved))
        if saved is None:
            message = f"{path}: no host memory for the session's state; its {num_saved} tokens will be computed again"
            warnings.warn(message, DeltafoldWarning, stacklevel=3)
    return Session(services, token_ids=token_ids, messages=messages, saved=saved)


def _digest(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """Of everything in a session's file but itself."""
    digest = hashlib.blake2b(json.dumps(metadata, sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _checked_entry(
    services: SessionServices, path: str | Path, tensors: dict[str, torch.Tensor], num_tokens: int
) -> HostEntry:
    host = services.core.runner.host
    state, rows = host.shapes(num_tokens)
    dtypes = host.dtypes()
    if tensors.keys() != (state | rows).keys():
        names = sorted(tensors.keys() ^ (state | rows).keys())
        raise SessionError(f"{path}: tensors missing or left over: {', '.join(names)}")
    for name, shape in (state | rows).items():
        found = tensors[name]
        if tuple(found.shape) != shape or found.dtype != dtypes[name]:
            raise SessionError(f"{path}: {name} is {found.dtype} {tuple(found.shape)}, not {dtypes[name]} {shape}")
        if not bool(torch.isfinite(found).all()):
            raise SessionError(f"{path}: {name} is not finite")
    return HostEntry({name: tensors[name] for name in state}, {name: tensors[name] for name in rows})


def _adopt(services: SessionServices, entry: HostEntry, num_tokens: int) -> SavedState | None:
    cache = services.core.scheduler.cache
    num_bytes = cache.num_bytes_of(num_tokens)
    if not cache.make_host_room(num_bytes):
        return None
    host_id = cache.host.take(num_bytes)
    services.core.runner.host.put(host_id, entry)
    return SavedState(host_id, num_tokens, num_bytes)
