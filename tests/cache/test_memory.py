"""Plans: what fits a budget, what is refused with its numbers, and that tensors take the bytes that were planned."""

from __future__ import annotations

import warnings

import pytest
import torch

from deltafold.cache.memory import (
    LayerSpec,
    MemoryPlan,
    allocate,
    allocated_bytes,
    bytes_per_block,
    bytes_per_slot,
    default_budget,
    plan_memory,
)
from deltafold.errors import CapacityError, DeltafoldWarning

STATE = LayerSpec(recurrent_shape=(2, 3, 5), conv_shape=(7, 3))
LATENT = LayerSpec(latent_dim=11)
KV = LayerSpec(kv_shape=(3, 5))
SPECS = (STATE, LATENT, STATE)
SLOT = 2 * (30 * 4 + 21 * 2)
BLOCK = 64 * 11 * 2
BF16 = torch.bfloat16


def plan(budget: int, *, specs: tuple[LayerSpec, ...] = SPECS, **options: int | None) -> MemoryPlan:
    values = {"max_num_seqs": 4, "max_model_len": 128, "model_limit": 4096} | options
    return plan_memory(specs, BF16, budget=budget, **values)  # type: ignore[arg-type]


def test_bytes_by_hand() -> None:
    assert bytes_per_slot(SPECS, BF16) == SLOT == 324
    assert bytes_per_block(SPECS, BF16) == BLOCK == 1408
    assert bytes_per_slot((LATENT,), BF16) == bytes_per_block((STATE,), BF16) == 0


def test_the_release_s_numbers() -> None:
    """Of the full model in bfloat16: 20 KDA and 7 MLA layers; 43.4 MB a request, 8,064 bytes a token."""
    kda = LayerSpec(recurrent_shape=(32, 128, 128), conv_shape=(3 * 4096, 3))
    specs = (kda,) * 20 + (LayerSpec(latent_dim=576),) * 7
    assert bytes_per_slot(specs, BF16) == pytest.approx(43.4e6, rel=1e-2)
    assert bytes_per_block(specs, BF16) == 8064 * 64


@pytest.mark.parametrize("budget", [10_000, 30_000, 123_457, 10**7])
@pytest.mark.parametrize("max_snapshots", [0, 3])
@pytest.mark.parametrize("max_model_len", [128, None])
@pytest.mark.filterwarnings("ignore::deltafold.errors.DeltafoldWarning")
def test_planned_bytes_are_allocated_and_fit(budget: int, max_snapshots: int, max_model_len: int | None) -> None:
    """Fault 15."""
    found = plan(budget, max_snapshots=max_snapshots, max_model_len=max_model_len)
    assert found.num_bytes == found.num_blocks * BLOCK + found.num_state_slots * SLOT <= budget == found.budget
    assert allocated_bytes(allocate(found, SPECS, BF16, torch.device("cpu"))) == found.num_bytes
    assert found.max_model_len <= found.num_cache_tokens == found.num_blocks * 64
    assert found.num_slots >= 1


def test_tensors_have_the_shapes_of_the_contract() -> None:
    first, second, _ = allocate(plan(10**6), SPECS, BF16, torch.device("cpu"))
    assert first.recurrent_state is not None
    assert first.conv_state is not None
    assert second.latent_cache is not None
    assert (first.recurrent_state.shape, first.recurrent_state.dtype) == ((4, 2, 3, 5), torch.float32)
    assert (first.conv_state.shape, first.conv_state.dtype) == ((4, 7, 3), BF16)
    assert (second.latent_cache.shape, second.latent_cache.dtype) == ((8, 64, 11), BF16)
    assert first.latent_cache is second.recurrent_state is second.conv_state is None


def test_more_memory_than_all_requests_can_use_is_left() -> None:
    assert plan(10**9).num_blocks == 4 * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan(4 * SLOT + 8 * BLOCK).num_slots == 4


def test_slots_that_do_not_fit_are_warned_of() -> None:
    """Fault 14."""
    with pytest.warns(DeltafoldWarning, match=r"max_num_seqs .*100.* 3\b"):
        found = plan(3 * (SLOT + BLOCK), max_num_seqs=100, max_model_len=64)
    assert (found.num_slots, found.num_blocks) == (3, 3)


def test_one_request_that_does_not_fit_is_an_error_with_the_numbers() -> None:
    least = SLOT + 2 * BLOCK
    assert plan(least, max_num_seqs=1).max_model_len == 128
    with pytest.raises(CapacityError, match=rf"\b{least}\b.*\b{least - 1}\b"):
        plan(least - 1, max_num_seqs=1)
    with pytest.raises(CapacityError):
        plan(SLOT + BLOCK - 1, max_num_seqs=1, max_model_len=None)


@pytest.mark.filterwarnings("ignore::deltafold.errors.DeltafoldWarning")
def test_without_max_model_len_one_request_can_use_what_there_is() -> None:
    assert plan(SLOT + 5 * BLOCK + 7, max_num_seqs=1, max_model_len=None).max_model_len == 5 * 64
    assert plan(10**8, max_num_seqs=1, max_model_len=None, model_limit=1000).max_model_len == 1000


def test_snapshots_do_not_take_what_one_request_needs() -> None:
    for budget in range(SLOT + 2 * BLOCK, 4 * (SLOT + 2 * BLOCK), 97):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = plan(budget, max_snapshots=50)
        assert found.num_blocks >= 2
        assert found.num_bytes <= budget


@pytest.mark.parametrize("specs", [(STATE,), (LATENT,), (KV,), (STATE, KV, KV)])
def test_models_of_other_kinds_of_layers(specs: tuple[LayerSpec, ...]) -> None:
    found = plan(10**6, specs=specs)
    assert (found.num_slots, found.num_blocks) == (4, 8)
    assert allocated_bytes(allocate(found, specs, BF16, torch.device("cpu"))) == found.num_bytes


def test_keys_and_values_of_a_block() -> None:
    assert bytes_per_block((KV, STATE, KV, LATENT), BF16) == 64 * (2 * 2 * 15 + 11) * 2
    assert bytes_per_slot((KV, STATE), BF16) == SLOT // 2
    cache = allocate(plan(10**6, specs=(KV,)), (KV,), BF16, torch.device("cpu"))[0]
    assert cache.key_cache is not None
    assert cache.value_cache is not None
    assert cache.key_cache.shape == cache.value_cache.shape == (8, 64, 3, 5)
    assert cache.latent_cache is cache.recurrent_state is cache.conv_state is None
    assert [name for name, _ in cache.block_tensors()] == ["key_cache", "value_cache"]


def test_a_model_without_state_has_no_snapshots_but_blocks_to_cache() -> None:
    found = plan(10**9, specs=(KV,), max_snapshots=3)
    assert (found.num_slots, found.num_snapshot_slots, found.num_blocks) == (4, 0, (4 + 3) * 2)
    assert plan(10**9, specs=(KV, STATE), max_snapshots=3).num_snapshot_slots == 3


def test_the_default_is_a_share_of_what_is_free_on_the_host() -> None:
    assert 0 < default_budget(torch.device("cpu")) < 2**50
