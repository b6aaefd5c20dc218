"""What the scheduler decides for one step, as plain integers. The runner turns it into tensors."""

from __future__ import annotations

from dataclasses import dataclass

from deltafold.scheduler.request import Request
from deltafold.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class SnapshotPoint:
    """The state after the first `num_tokens` (a multiple of the chunk grid) of a chunk also goes to `slot`."""

    slot: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: tokens `num_computed_tokens : num_computed_tokens + num_scheduled_tokens`."""

    request: Request
    num_computed_tokens: int
    num_scheduled_tokens: int
    is_decode: bool
    has_initial_state: bool  # the slot holds this request's state up to num_computed_tokens
    is_sampled: bool  # the step reaches the request's last known token, so a new one is drawn
    snapshot: SnapshotPoint | None = None  # where inside the chunk the state is copied aside
    has_device_token: bool = False  # the last known token was drawn in the request's slot: the device has it


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `scheduled` has decodes first; `preempted` lost their blocks and slot in this call."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_scheduled_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What a step gave one request: the drawn token if it `is_sampled`, logprobs if it asked for them. Where
    `is_finite` is false its logits were not, and nothing was drawn."""

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    is_finite: bool = True
