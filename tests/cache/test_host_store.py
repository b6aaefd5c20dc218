"""Moves of state between slots, blocks and host memory: exactly the bytes named, in the order listed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltafold.cache import host_store
from deltafold.cache.host_store import HostStore
from deltafold.cache.memory import BLOCK_SIZE, LayerCache
from deltafold.cache.transfers import CopySlot, DropHost, LoadBlocks, LoadSlot, SaveBlocks, SaveSlot

NUM_SLOTS, NUM_BLOCKS = 4, 5


def random_caches(dtype: torch.dtype = torch.bfloat16) -> tuple[LayerCache, ...]:
    """One recurrent layer, one latent layer, one of both kinds; every value another."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(kind)

    state = (make(NUM_SLOTS, 2, 3, 5, kind=torch.float32), make(NUM_SLOTS, 7, 3))
    latent = make(NUM_BLOCKS, BLOCK_SIZE, 6)
    both = (make(NUM_SLOTS, 1, 4, 2, kind=torch.float32), make(NUM_SLOTS, 3, 2), make(NUM_BLOCKS, BLOCK_SIZE, 4))
    return (LayerCache(*state, None), LayerCache(None, None, latent), LayerCache(*both))


def state_of(caches: tuple[LayerCache, ...], slot: int) -> list[Tensor]:
    return [tensor[slot].clone() for cache in caches for _, tensor in cache.slot_tensors()]


def rows_of(caches: tuple[LayerCache, ...], block_ids: list[int]) -> list[Tensor]:
    return [tensor[block_ids].flatten(0, 1) for cache in caches for _, tensor in cache.block_tensors()]


def all_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_state_comes_back_bit_for_bit_and_touches_nothing_else() -> None:
    caches = random_caches()
    store = HostStore(caches)
    before = [state_of(caches, slot) for slot in range(NUM_SLOTS)]
    rows = rows_of(caches, list(range(NUM_BLOCKS)))
    assert store.run([SaveSlot(1, 7), CopySlot(2, 1), LoadSlot(7, 3), LoadSlot(7, 2)]) == []
    assert all_equal(state_of(caches, 0), before[0])
    assert all_equal(state_of(caches, 1), before[2])
    assert all_equal(state_of(caches, 2), before[1])
    assert all_equal(state_of(caches, 3), before[1])
    assert all_equal(rows_of(caches, list(range(NUM_BLOCKS))), rows)


def test_what_was_saved_does_not_change_with_the_slot() -> None:
    caches = random_caches()
    store = HostStore(caches)
    before, rows = state_of(caches, 0), rows_of(caches, [1])
    store.run([SaveSlot(0, 1), SaveBlocks((1,), 64, 1), CopySlot(3, 0)])
    for cache in caches:
        for _, tensor in [*cache.slot_tensors(), *cache.block_tensors()]:
            tensor.zero_()
    entry = store.entry(1)
    assert all_equal(list(entry.state.values()), before)
    assert all_equal(list(entry.rows.values()), rows)


@pytest.mark.parametrize(("num_tokens", "first_block"), [(1, 0), (64, 0), (130, 0), (130, 1), (130, 2), (192, 1)])
def test_blocks_come_back_at_other_places(num_tokens: int, first_block: int) -> None:
    caches = random_caches()
    store = HostStore(caches)
    source = [4, 0, 2][: -(-num_tokens // BLOCK_SIZE)]
    expected = [rows[:num_tokens] for rows in rows_of(caches, source)]
    target = [3, 1, 0][first_block : len(source)]
    untouched = [block for block in range(NUM_BLOCKS) if block not in target]
    store.run([SaveBlocks(tuple(source), num_tokens, 9)])
    others = rows_of(caches, untouched)
    for cache in caches:
        for _, tensor in cache.block_tensors():
            tensor[target] = float("nan")
    store.run([LoadBlocks(9, first_block, tuple(target))])
    first = first_block * BLOCK_SIZE
    found = [rows[: num_tokens - first] for rows in rows_of(caches, target)]
    assert all_equal(found, [rows[first:] for rows in expected])
    assert all_equal(rows_of(caches, untouched), others)


def test_an_entry_takes_the_bytes_it_is_counted_with() -> None:
    """One slot, and the rows of 70 tokens, not of two whole blocks."""
    caches = random_caches()
    store = HostStore(caches)
    store.run([SaveSlot(0, 1), SaveBlocks((0, 1), 70, 1)])
    entry = store.entry(1)
    tensors = [*entry.state.values(), *entry.rows.values()]
    slot = sum(t[0].nbytes for cache in caches for _, t in cache.slot_tensors())
    row = sum(t[0, 0].nbytes for cache in caches for _, t in cache.block_tensors())
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == slot + 70 * row


def test_names_shapes_and_dtypes_are_those_of_an_entry() -> None:
    store = HostStore(random_caches())
    store.run([SaveSlot(0, 1), SaveBlocks((0, 1), 70, 1)])
    entry = store.entry(1)
    state, rows = store.shapes(70)
    assert {name: tuple(t.shape) for name, t in entry.state.items()} == state
    assert {name: tuple(t.shape) for name, t in entry.rows.items()} == rows
    assert {name: t.dtype for name, t in (entry.state | entry.rows).items()} == store.dtypes()
    assert store.dtypes()["layers.0.recurrent_state"] is torch.float32
    assert store.dtypes()["layers.1.latent_cache"] is torch.bfloat16


def test_dropped_entries_are_gone_and_dropping_twice_is_nothing() -> None:
    store = HostStore(random_caches())
    store.run([SaveSlot(0, 1), DropHost(1), DropHost(1)])
    with pytest.raises(KeyError):
        store.entry(1)


@pytest.mark.parametrize("error", [MemoryError("injected"), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
@pytest.mark.parametrize("failing", range(1, 8))
def test_memory_that_runs_out_leaves_no_half_saved_entry(
    error: Exception, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch says it by a RuntimeError on the CPU. An entry has six tensors; of a second one the first fails."""
    store = HostStore(random_caches())
    empty, calls = torch.empty, iter(range(1, 100))

    def running_out(*args: object, **kwargs: object) -> Tensor:
        if next(calls) == failing:
            raise error
        return empty(*args, **kwargs)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(host_store.torch, "empty", running_out)
    moves = [SaveSlot(0, 1), SaveBlocks((0, 1), 70, 1), SaveSlot(1, 2), DropHost(3)]
    failed = store.run(moves)
    assert failed == ([1] if failing <= 6 else [2])
    for host_id in failed:
        with pytest.raises(KeyError):
            store.entry(host_id)
    assert store.entry(3 - failed[0]).state.keys() == store.shapes(0)[0].keys()


def test_a_true_shortage_of_host_memory_is_reported() -> None:
    """Not injected: one value a row, expanded to more rows than any machine has bytes."""
    huge = torch.zeros(1, 1, 1).expand(2, 2**50, 2**10)
    store = HostStore((LayerCache(huge, None, None),))
    assert store.run([SaveSlot(0, 1)]) == [1]
