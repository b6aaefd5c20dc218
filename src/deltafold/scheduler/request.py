"""One completion on its way through the engine. The scheduler owns and changes it; others read it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from deltafold.cache.prefix_cache import Snapshot
from deltafold.errors import DeltafoldError
from deltafold.types import FinishReason, SamplingParams, TokenLogprob, Usage


class RequestStatus(enum.Enum):
    """Where a request is: WAITING holds no memory, RUNNING holds blocks and a slot, FINISHED holds none again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True, slots=True)
class SavedState:
    """A request's memory in host memory: blocks and state after its first `num_tokens` tokens."""

    host_id: int
    num_tokens: int
    num_bytes: int


PENDING_TOKEN = -1
"""Stands for a token that was drawn and that the host has not seen yet; only while the next step is scheduled."""


@dataclass(slots=True, eq=False)
class Request:
    """One completion of one prompt.

    `token_ids` is the prompt followed by the output. The first `num_computed_tokens` of them are in the cache and,
    once `has_state` is set by a finished step, in the state slot. Tokens below `num_prefill_tokens` are computed in
    chunks, those from there on one a step; a preempted request has its output among the former.
    """

    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    end_token_ids: frozenset[int]
    max_total_tokens: int
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    has_state: bool = False
    has_device_token: bool = False  # the last known token was drawn in the slot it holds
    block_ids: list[int] = field(default_factory=list)
    state_slot: int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: DeltafoldError | None = None
    num_failed_steps: int = 0
    salt: str = ""
    leader: Request | None = None  # of the same prompt and call: once it is prefilled, this one starts from its cache
    is_admitted_before: bool = False
    saved: SavedState | None = None  # what to start from instead of the first token
    keeps_state: bool = False  # at the end, leave memory behind in `saved`: a session goes on from it
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    snapshot_positions: list[int] = field(default_factory=list)  # wanted inside what is left of the prefill
    pending_snapshots: list[Snapshot] = field(default_factory=list)
    decode_snapshot: Snapshot | None = None  # the latest of its output; the next one replaces it

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_prefill_tokens = len(self.token_ids)

    @property
    def key(self) -> str:
        """The owner name in the pools: unique among completions, also those of one call with n > 1."""
        return f"{self.request_id}/{self.index}"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def is_prefilled(self) -> bool:
        """Whether what is left to compute is one decode token a step."""
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, self.num_output_tokens, self.num_cached_tokens)
