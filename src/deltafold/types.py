"""The values that cross the public surface: what a caller passes in and gets back.

All are frozen. They import nothing of deltafold but `errors`, and validate themselves on creation.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltafold.errors import DeltafoldError, OptionError, RequestError

MAX_TOP_LOGPROBS = 64
"""Largest `logprobs` a request may ask for, in entries per position."""

MAX_STOP_STRINGS = 16
"""Largest number of stop strings a request may have."""

LOGPROB_FLOOR = -9999.0
"""Logprobs below this value, minus infinity included, are reported as it (nats), so that JSON stays valid."""


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def _check_number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    # NaN is what differs from itself; math.isfinite would overflow on a large int.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == math.inf:
        raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
    if not low <= value <= high or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise RequestError(f"{name} must be in {bracket}{low}, {high}], got {value!r}", param=name)


def _check_int(name: str, value: object, low: int, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    if not low <= value <= high:
        limit = f">= {low}" if math.isinf(high) else f"in [{low}, {int(high)}]"
        raise RequestError(f"{name} must be {limit}, got {value!r}", param=name)


def _as_tuple(name: str, value: object, wanted: str) -> tuple[Any, ...]:
    if not isinstance(value, Iterable):
        raise RequestError(f"{name} must be {wanted}, got {value!r}", param=name)
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and where it stops.

    Args:
        max_tokens: most tokens to generate; None means up to `max_model_len`.
        n: how many completions of the same prompt.
        temperature: 0 is greedy (the largest logit, the lowest id among equals).
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this.
        min_p: keep tokens at least this fraction as likely as the most likely one.
        presence_penalty: subtracted from the logit of every token already generated.
        frequency_penalty: subtracted once per time a token was generated.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        seed: makes the request's random stream reproducible, whatever else is in its batch.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end it, besides the model's own end tokens.
        ignore_eos: go on past the model's end tokens.
        logprobs: report the chosen token's log-probability and this many of the most likely ones (0 is allowed).
        prompt_logprobs: the same for each prompt token but the first, given those before it.
        cache_salt: only requests with the same salt share cached prefixes.

    Raises:
        RequestError: naming the field, its value and the limit.
    """

    max_tokens: int | None = None
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_int("n", self.n, 1, 128)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _check_int(name, value, 0, MAX_TOP_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be a boolean, got {self.ignore_eos!r}", param="ignore_eos")
        if not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt must be a string, got {self.cache_salt!r}", param="cache_salt")
        self._freeze_collections()

    @property
    def needs_output_on_host(self) -> bool:
        """Whether drawing a token takes more than the logits: what was drawn before, or logprobs to report."""
        has_penalty = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(has_penalty) or self.logprobs is not None or self.prompt_logprobs is not None

    def _freeze_collections(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop, "a string or strings")
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(stop)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must be non-empty strings, got {text!r}", param="stop")
        object.__setattr__(self, "stop", stop)
        stop_token_ids = _as_tuple("stop_token_ids", self.stop_token_ids, "a list of integers")
        for token_id in stop_token_ids:
            _check_int("stop_token_ids", token_id, 0)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        if not isinstance(self.logit_bias, Mapping):
            message = f"logit_bias must map token ids to numbers, got {self.logit_bias!r}"
            raise RequestError(message, param="logit_bias")
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0)
            _check_number("logit_bias", bias, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most likely tokens at a position; `logprob` in nats, at least `LOGPROB_FLOOR`."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The token at a position: its log-probability (nats, of the unmodified logits), its rank (1 is the most
    likely) and the most likely tokens, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one completion. `num_cached_tokens` of the prompt were restored instead of computed."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One increment of a stream.

    `text` may be empty while a character or a possible stop string is incomplete; the texts of all increments
    of one `index` concatenate to the completion's text. `token_ids` are the new ids (empty on an increment that
    only ends the stream). The last increment of an index has `finish_reason` and `usage`.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished completion.

    `token_ids` includes the end token that stopped it, if one did; `text` never shows it. `stop_reason` is the
    stop string or token id that ended it, or None. `logprobs` (one entry per output token) and `prompt_logprobs`
    (one per prompt token, None for the first) are there if the request asked for them.
    """

    request_id: str
    index: int
    text: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: DeltafoldError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Limits of an engine, as asked for; `Engine.describe()` reports what they were resolved to.

    Args:
        max_num_seqs: most requests computed in one step (each owns one state slot).
        max_num_batched_tokens: most prompt tokens computed in one step, at least 64; the running requests' one
            decode token each comes on top.
        max_model_len: most tokens, prompt and output together, of one request; None takes the model's own
            limit, or what the memory holds if that is less.
        max_waiting: most requests waiting; one more raises `QueueFullError`. None is no limit.
        memory: bytes for cache blocks and state slots together; None takes a share of what is free on the device.
        seed: seeds requests that bring none of their own; None draws one from the operating system.
        prefix_cache: start requests from what earlier ones with the same first tokens computed.
        max_snapshots: most state snapshots kept on the device, each as large as a running request's state.
        snapshot_interval: tokens between snapshots inside a long prefill, a multiple of 64.
        host_memory: most bytes of host memory for further snapshots, preempted requests and sessions.
        decode_graphs: on a GPU with the Triton backend, capture decode steps as CUDA graphs at start.
        free_memory_floor: share of a GPU's memory that stays free, in [0, 0.9].
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    max_waiting: int | None = None
    memory: int | None = None
    seed: int | None = None
    prefix_cache: bool = True
    max_snapshots: int = 64
    snapshot_interval: int = 4096
    host_memory: int = 2**30
    decode_graphs: bool = True
    free_memory_floor: float = 0.06

    def __post_init__(self) -> None:
        lowest = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 2, "max_waiting": 0, "memory": 1}
        lowest |= {"max_snapshots": 0, "snapshot_interval": 64, "host_memory": 0}
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "max_waiting", "memory"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise OptionError(f"{name} must be an integer >= {low}, got {value!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise OptionError(f"seed must be an integer, got {self.seed!r}")
        if self.snapshot_interval % 64:
            raise OptionError(f"snapshot_interval must be a multiple of 64, got {self.snapshot_interval!r}")
        for name in ("prefix_cache", "decode_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} must be a boolean, got {getattr(self, name)!r}")
        floor = self.free_memory_floor
        if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 <= floor <= 0.9:
            raise OptionError(f"free_memory_floor must be a share in [0, 0.9], got {floor!r}")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine's load and counters since start, for metrics; see `Engine.stats()`."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_state_slots: int
    num_free_state_slots: int
    num_cached_state_slots: int
    num_snapshots: int
    num_preemptions: int
    num_saved_preemptions: int
    num_host_bytes: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_steps: int


ChatMessage = Mapping[str, Any]
"""One chat message: `role` (system, user, assistant, tool) and `content` (a string, or a list of text parts)."""
