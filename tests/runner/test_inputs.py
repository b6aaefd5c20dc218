"""One step's tensors against what they are said to be, on a step of two decodes, a continued and a new prefill."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.stepping import GREEDY, make_request

from deltafold.runner.inputs import build_batch, logits_rows
from deltafold.scheduler.output import ScheduledRequest, SchedulerOutput
from deltafold.scheduler.request import Request

CPU = torch.device("cpu")


def scheduled(request: Request, start: int, count: int, *, is_decode: bool) -> ScheduledRequest:
    return ScheduledRequest(
        request=request,
        num_computed_tokens=start,
        num_scheduled_tokens=count,
        is_decode=is_decode,
        has_initial_state=start > 0,
        is_sampled=start + count == len(request.token_ids),
    )


def running(num_tokens: int, slot: int, block_ids: list[int], first: int, **params: object) -> Request:
    request = make_request(range(first, first + num_tokens), replace(GREEDY, **params), request_id=f"r{slot}")
    request.state_slot = slot
    request.block_ids = block_ids
    return request


def four_items() -> tuple[ScheduledRequest, ...]:
    return (
        scheduled(running(65, 3, [9, 4], 100), 64, 1, is_decode=True),
        scheduled(running(5, 0, [7], 200), 4, 1, is_decode=True),
        scheduled(running(200, 2, [1, 0, 8, 5], 300), 64, 64, is_decode=False),
        scheduled(running(3, 6, [2], 600), 0, 3, is_decode=False),
    )


def test_a_mixed_step() -> None:
    batch = build_batch(SchedulerOutput(four_items(), ()), CPU)
    assert (batch.num_decodes, batch.num_requests) == (2, 4)
    assert batch.token_ids.tolist() == [164, 204, *range(364, 428), 600, 601, 602]
    assert batch.positions.tolist() == [64, 4, *range(64, 128), 0, 1, 2]
    assert batch.query_start_loc.tolist() == [0, 1, 2, 66, 69]
    assert batch.prefill_start_loc.tolist() == [0, 64, 67]
    assert batch.seq_lens.tolist() == [65, 5, 128, 3]
    assert batch.slot_mapping.tolist() == [4 * 64, 7 * 64 + 4, *range(64), 128, 129, 130]
    assert batch.block_table[:, :1].flatten().tolist() == [9, 7, 1, 2]
    assert batch.block_table[0].tolist() == [9, 4]
    assert batch.block_table[2].tolist() == [1, 0]
    assert batch.state_slots.tolist() == [3, 0, 2, 6]
    assert batch.has_initial_state.tolist() == [True, True, True, False]
    assert batch.logits_indices.tolist() == [0, 1, 68]
    assert batch.snapshots is None


def test_dtypes_are_the_contract_s() -> None:
    batch = build_batch(SchedulerOutput(four_items(), ()), CPU)
    for name in ("token_ids", "positions", "slot_mapping", "logits_indices"):
        assert getattr(batch, name).dtype == torch.int64
    for name in ("query_start_loc", "prefill_start_loc", "seq_lens", "block_table", "state_slots"):
        assert getattr(batch, name).dtype == torch.int32
    assert batch.has_initial_state.dtype == torch.bool


def test_rows_of_logits_are_those_that_are_wanted() -> None:
    inner = scheduled(running(200, 0, [1, 0, 8, 5], 0), 64, 64, is_decode=False)
    last = scheduled(running(130, 0, [1, 0, 8], 0), 128, 2, is_decode=False)
    scored = scheduled(running(200, 0, [1, 0, 8, 5], 0, prompt_logprobs=1), 64, 64, is_decode=False)
    assert [logits_rows(item) for item in (inner, last, scored)] == [0, 1, 64]


def test_the_block_table_is_as_wide_as_the_step_s_longest_context() -> None:
    """Fault 17: not as max_model_len, nor as what a request will hold later."""
    short = scheduled(running(5000, 0, list(range(79)), 0), 0, 64, is_decode=False)
    assert build_batch(SchedulerOutput((short,), ()), CPU).block_table.shape == (1, 1)
