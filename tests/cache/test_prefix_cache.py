"""The prefix cache and the host budget alone: hashes, what is visible when, what goes first."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from deltafold.cache.host_budget import HostBudget
from deltafold.cache.pools import BlockPool, PoolExhaustedError, StatePool
from deltafold.cache.prefix_cache import PrefixCache, Snapshot, extend_hashes
from deltafold.cache.transfers import CopySlot, DropHost, LoadSlot, SaveSlot

BLOCK = 64
SLOT_BYTES = 100


def make_cache(
    *, num_blocks: int = 16, max_snapshots: int = 4, host_memory: int = 0, bytes_per_slot: int = SLOT_BYTES
) -> PrefixCache:
    return PrefixCache(
        BlockPool(num_blocks, BLOCK),
        StatePool(2 + max_snapshots),
        HostBudget(host_memory),
        max_snapshots=max_snapshots,
        bytes_per_slot=bytes_per_slot,
        bytes_per_block=BLOCK * 10,
    )


def chain(seed: int, num_blocks: int, salt: str = "") -> list[bytes]:
    draw = random.Random(seed)
    return hashes_of([draw.randrange(1000) for _ in range(num_blocks * BLOCK)], salt)


def hashes_of(token_ids: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, BLOCK, salt)
    return hashes


def store(cache: PrefixCache, hashes: list[bytes]) -> Snapshot:
    """Blocks of the whole chain, and a snapshot at its end; nobody holds them afterwards."""
    owner = f"writer of {hashes[-1].hex()}"
    known = cache.match(hashes).num_known_blocks
    cache.share(owner, hashes[:known])
    blocks = cache.allocate_blocks(owner, len(hashes) - known)
    snapshot = cache.reserve(hashes)
    assert snapshot is not None
    cache.publish_blocks(hashes[known:], blocks)
    cache.publish(snapshot)
    cache.blocks.free(owner)
    cache.check()
    return snapshot


def test_hashes_are_of_whole_blocks_and_of_all_before() -> None:
    tokens = list(range(300))
    hashes = hashes_of(tokens)
    assert len(hashes) == len(set(hashes)) == 4
    assert hashes_of(tokens[:255]) == hashes[:3]
    assert hashes_of([*tokens[:128], *[7] * 100])[:2] == hashes[:2]
    changed = hashes_of([9999, *tokens[1:]])
    assert all(a != b for a, b in zip(changed, hashes, strict=True))


def test_hashes_grow_as_tokens_come() -> None:
    tokens = list(range(500))
    grown: list[bytes] = []
    for length in range(0, 501, 7):
        extend_hashes(grown, tokens[:length], BLOCK, "s")
    extend_hashes(grown, tokens, BLOCK, "s")
    assert grown == hashes_of(tokens, "s")


def test_hashes_tell_salts_and_borders_of_tokens_apart() -> None:
    tokens = list(range(64))
    assert len({hashes_of(tokens, salt)[0] for salt in ("", "a", "b", "ab", "\0")}) == 5
    pairs = [[1, 256], [256, 1], [257, 0], [1 << 8, 1]]
    assert len({hashes_of([*pair, *tokens[2:]])[0] for pair in pairs}) == 3


def test_a_reserved_snapshot_is_invisible_until_it_is_published() -> None:
    cache = make_cache()
    hashes = chain(1, 2)
    blocks = cache.allocate_blocks("r", 2)
    snapshot = cache.reserve(hashes)
    assert snapshot is not None
    cache.publish_blocks(hashes, blocks)
    assert cache.match(hashes).num_known_blocks == 2
    assert cache.match(hashes).num_blocks == cache.num_snapshots == 0
    assert cache.reserve(hashes) is None  # one of a kind
    cache.publish(snapshot)
    assert cache.match(hashes).snapshot is snapshot
    cache.check()


def test_a_discarded_snapshot_gives_its_slot_back_once() -> None:
    cache = make_cache()
    pending = cache.reserve(chain(1, 2))
    assert pending is not None
    published = store(cache, chain(2, 2))
    for snapshot in (pending, published, pending, published):
        cache.discard(snapshot)
        cache.check()
    assert cache.slots.num_free == cache.slots.total
    assert cache.match(chain(2, 2)).num_blocks == 0
    again = store(cache, chain(2, 2))
    cache.discard(published)  # of the same tokens, but not this one
    assert cache.match(chain(2, 2)).snapshot is again


def test_pending_snapshots_count_and_are_never_evicted() -> None:
    cache = make_cache(max_snapshots=2)
    pending = [cache.reserve(chain(seed, 1)) for seed in (1, 2)]
    assert None not in pending
    assert cache.reserve(chain(3, 1)) is None
    assert cache.slots.num_held == 2


def test_without_room_for_any_there_are_none() -> None:
    cache = make_cache(max_snapshots=0, host_memory=10 * SLOT_BYTES)
    assert cache.reserve(chain(1, 1)) is None
    assert cache.transfers == []


def test_of_two_blocks_with_the_same_tokens_the_first_stays_known() -> None:
    cache = make_cache()
    hashes = chain(1, 1)
    first, second = cache.allocate_blocks("a", 1), cache.allocate_blocks("b", 1)
    cache.publish_blocks(hashes, first)
    cache.publish_blocks(hashes, second)
    cache.blocks.free("a")
    cache.blocks.free("b")
    assert cache.share("c", hashes) == first
    assert cache.blocks.num_free == cache.blocks.total - 1
    cache.check()


def test_blocks_are_evicted_for_new_ones_and_only_if_that_suffices() -> None:
    cache = make_cache(num_blocks=6)
    snapshot = store(cache, chain(1, 4))
    cache.allocate_blocks("a", 1)
    with pytest.raises(PoolExhaustedError):
        cache.allocate_blocks("b", 6)
    assert cache.blocks.num_cached == 4
    cache.allocate_blocks("b", 2)
    assert (cache.blocks.num_cached, snapshot.num_missing) == (3, 1)
    match = cache.match(chain(1, 4))
    assert (match.num_known_blocks, match.num_blocks) == (3, 0)  # the deepest went first
    cache.check()


def test_a_stranded_snapshot_counts_again_when_its_blocks_are_back() -> None:
    cache = make_cache(num_blocks=6)
    hashes = chain(1, 3)
    snapshot = store(cache, hashes)
    cache.allocate_blocks("a", 5)
    cache.blocks.free("a")
    assert snapshot.num_missing == 2
    block_ids = cache.allocate_blocks("b", 2)
    cache.publish_blocks(hashes[1:], block_ids)
    assert snapshot.num_missing == 0
    assert cache.match(hashes).snapshot is snapshot
    cache.check()


def test_held_blocks_are_not_evicted() -> None:
    cache = make_cache(num_blocks=4)
    hashes = chain(1, 3)
    store(cache, hashes)
    held = cache.share("reader", hashes)
    with pytest.raises(PoolExhaustedError):
        cache.allocate_blocks("b", 2)
    assert cache.blocks.held_by("reader") == tuple(held)
    cache.check()


def test_a_model_without_state_matches_by_blocks_alone() -> None:
    cache = make_cache(bytes_per_slot=0)
    hashes = chain(1, 3)
    blocks = cache.allocate_blocks("a", 3)
    cache.publish_blocks(hashes, blocks)
    assert cache.reserve(hashes) is None
    match = cache.match([*hashes, chain(2, 1)[0]])
    assert (match.num_blocks, match.snapshot) == (3, None)


def test_full_slots_move_the_oldest_to_host_memory_before_the_newcomer_writes() -> None:
    cache = make_cache(max_snapshots=1, host_memory=SLOT_BYTES)
    first = store(cache, chain(1, 1))
    slot = first.slot
    second = store(cache, chain(2, 1))
    assert cache.transfers == [SaveSlot(slot, first.host_id)]
    assert (first.slot, second.slot) == (None, slot)
    cache.transfers.clear()
    cache.restore(first, 0)
    cache.restore(second, 1)
    assert cache.transfers == [LoadSlot(first.host_id, 0), CopySlot(slot, 1)]
    cache.check()


def test_a_state_on_its_way_to_host_memory_is_not_read() -> None:
    """The move is only listed, and may fail; a request may start from it once it is done."""
    cache = make_cache(max_snapshots=1, host_memory=SLOT_BYTES)
    first = store(cache, chain(1, 1))
    store(cache, chain(2, 1))
    assert cache.match(chain(1, 1)).num_blocks == 0
    cache.transfers.clear()
    assert cache.match(chain(1, 1)).snapshot is first


def test_a_failed_move_to_host_memory_forgets_the_snapshot() -> None:
    cache = make_cache(max_snapshots=1, host_memory=SLOT_BYTES)
    first = store(cache, chain(1, 1))
    store(cache, chain(2, 1))
    assert first.host_id is not None
    cache.transfers.clear()
    cache.host_write_failed(first.host_id)
    assert cache.match(chain(1, 1)).num_blocks == cache.host.num_bytes == 0
    cache.check()


def test_stranded_snapshots_are_dropped_and_not_moved_to_host_memory() -> None:
    cache = make_cache(num_blocks=4, max_snapshots=2, host_memory=4 * SLOT_BYTES)
    kept = store(cache, chain(1, 1))
    stranded = store(cache, chain(2, 2))
    cache.match(chain(1, 1))
    cache.share("reader", chain(1, 1))
    cache.allocate_blocks("a", 2)
    assert (kept.num_missing, stranded.num_missing) == (0, 1)
    cache.blocks.free("a")
    store(cache, chain(3, 1))
    assert cache.host.num_bytes == 0
    assert kept.slot is not None
    assert stranded.key not in cache._in_slots
    cache.check()


def test_host_memory_drops_stranded_snapshots_first_then_the_oldest() -> None:
    cache = make_cache(num_blocks=16, max_snapshots=1, host_memory=3 * SLOT_BYTES)
    snapshots = [store(cache, chain(seed, 1)) for seed in (1, 2, 3, 4)]
    cache.transfers.clear()
    cache._forget(evict(cache, snapshots[1].key))
    assert cache.make_host_room(SLOT_BYTES)
    assert cache.transfers == [DropHost(snapshots[1].host_id or 0)]
    assert cache.make_host_room(2 * SLOT_BYTES)
    assert snapshots[0].key not in cache._in_host
    assert snapshots[2].key in cache._in_host
    cache.check()


def evict(cache: PrefixCache, key: bytes) -> int:
    block = cache._block_of[key]
    cache.blocks._cached.move_to_end(block, last=False)
    assert cache.blocks.evict(1) == [block]
    return block


def test_room_that_can_never_be_made_drops_nothing() -> None:
    cache = make_cache(max_snapshots=1, host_memory=2 * SLOT_BYTES)
    for seed in (1, 2, 3):
        store(cache, chain(seed, 1))
    assert not cache.make_host_room(2 * SLOT_BYTES + 1)
    assert cache.num_snapshots == 3


def test_host_memory_of_others_is_not_dropped_for_snapshots() -> None:
    cache = make_cache(max_snapshots=1, host_memory=SLOT_BYTES)
    session = cache.host.take(SLOT_BYTES)
    store(cache, chain(1, 1))
    store(cache, chain(2, 1))
    assert cache.host.holds(session)
    assert cache.num_snapshots == 1
    assert not cache.make_host_room(1)


def test_a_hit_makes_a_snapshot_the_latest() -> None:
    cache = make_cache(max_snapshots=2)
    first, second = store(cache, chain(1, 1)), store(cache, chain(2, 1))
    cache.restore(first, 0)
    store(cache, chain(3, 1))
    assert next(iter(cache._in_slots)) == first.key
    assert second.key not in cache._in_slots


def test_saved_bytes_are_of_one_state_and_the_rows_of_every_token() -> None:
    assert make_cache().num_bytes_of(0) == SLOT_BYTES
    assert make_cache().num_bytes_of(65) == SLOT_BYTES + 650


def test_host_bytes_are_free_again_with_the_last_reference() -> None:
    budget = HostBudget(100)
    host_id = budget.take(60)
    assert not budget.fits(41)
    with pytest.raises(ValueError, match=r"41 bytes asked for, 40 of 100 left"):
        budget.take(41)
    budget.retain(host_id)
    assert not budget.release(host_id)
    assert budget.num_bytes == 60
    assert budget.release(host_id)
    assert (budget.num_bytes, budget.holds(host_id)) == (0, False)
    assert budget.take(100) != host_id
    budget.check()


TAMPERING: dict[str, Callable[[PrefixCache], object]] = {
    "a block known twice": lambda c: c._block_of.update({b"x" * 16: 0}),
    "a block known, not registered": lambda c: c.blocks._registered.discard(c._block_of[chain(1, 2)[0]]),
    "a block forgotten": lambda c: c._forget(c._block_of[chain(1, 2)[1]]),
    "a snapshot that miscounts": lambda c: setattr(next(iter(c._in_slots.values())), "num_missing", 1),
    "a snapshot in two places": lambda c: setattr(next(iter(c._in_slots.values())), "host_id", 5),
    "a slot lost": lambda c: c.slots.free(next(iter(c._in_slots.values())).owner),
    "host bytes lost": lambda c: setattr(c.host, "num_bytes", 1),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_check_notices(name: str) -> None:
    cache = make_cache(host_memory=1000)
    store(cache, chain(1, 2))
    cache.host.take(500)
    cache.check()
    TAMPERING[name](cache)
    with pytest.raises(AssertionError):
        cache.check()
