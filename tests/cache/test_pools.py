"""Ids with owners: what is handed out, taken back, shared and evicted; `check` finds what is wrong."""

from __future__ import annotations

import random

import pytest

from deltafold.cache.pools import BlockPool, IdPool, PoolExhaustedError, StatePool


def test_ids_are_free_or_held() -> None:
    pool = IdPool(5)
    first, second = pool.allocate("a", 2), pool.allocate("b", 3)
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_held) == (0, 5)
    assert pool.held_by("a") == tuple(first)
    assert pool.held_by("nobody") == ()
    pool.check()


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = IdPool(3)
    pool.allocate("a", 2)
    with pytest.raises(PoolExhaustedError, match=r"2 .*1 of 3"):
        pool.allocate("b", 2)
    assert (pool.num_free, pool.held_by("b")) == (1, ())
    pool.check()


def test_free_is_idempotent_and_takes_everything() -> None:
    pool = IdPool(4)
    pool.allocate("a", 1)
    pool.allocate("b", 1)
    pool.allocate("a", 2)
    for _ in range(3):
        pool.free("a")
        assert (pool.num_free, pool.num_held) == (3, 1)
        pool.check()


def test_an_owner_s_ids_keep_their_order() -> None:
    pool = BlockPool(10, 64)
    ids = [*pool.allocate("a", 3), *pool.allocate("a", 2), *pool.allocate("a", 1)]
    assert pool.held_by("a") == tuple(ids)


@pytest.mark.parametrize("total", [0, -1])
def test_a_pool_has_ids(total: int) -> None:
    with pytest.raises(ValueError, match=str(total)):
        IdPool(total)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (12, 1), (63, 1), (64, 1), (65, 2), (128, 2), (1_048_576, 16_384)]
)
def test_blocks_for_tokens(num_tokens: int, num_blocks: int) -> None:
    assert BlockPool(1, 64).num_blocks_for(num_tokens) == num_blocks


def break_free(pool: IdPool) -> None:
    pool._free.append(pool.held_by("a")[0])


def break_lost(pool: IdPool) -> None:
    pool._free.popleft()


def break_twice(pool: IdPool) -> None:
    pool._free.append(pool._free[0])


def break_foreign(pool: IdPool) -> None:
    pool._free.append(99)


@pytest.mark.parametrize("fault", [break_free, break_lost, break_twice, break_foreign])
@pytest.mark.parametrize("kind", [IdPool, StatePool, BlockPool])
def test_check_finds_what_is_wrong(kind: type[IdPool], fault) -> None:
    pool = BlockPool(6, 64) if kind is BlockPool else kind(6)
    pool.allocate("a", 2)
    pool.check()
    fault(pool)
    with pytest.raises(AssertionError, match=kind.__name__):
        pool.check()


def test_a_registered_block_is_cached_when_its_last_owner_leaves() -> None:
    pool = BlockPool(4, 64)
    first, second = pool.allocate("a", 2)
    pool.register(first)
    pool.share("b", [first])
    pool.free("a")
    assert (pool.num_free, pool.num_cached, pool.num_held) == (3, 0, 1)
    pool.free("b")
    assert (pool.num_free, pool.num_cached, pool.num_held, pool.num_available) == (3, 1, 0, 4)
    pool.share("c", [first])
    assert (pool.num_cached, pool.held_by("c")) == (0, (first,))
    with pytest.raises(ValueError, match=str(second)):
        pool.share("c", [second])
    pool.check()


def test_eviction_goes_by_age_and_only_takes_what_nobody_holds() -> None:
    pool = BlockPool(3, 64)
    ids = [pool.allocate(owner, 1)[0] for owner in "abc"]
    for block_id in ids:
        pool.register(block_id)
    pool.free("b")
    pool.free("a")
    assert pool.evict(1) == [ids[1]]
    assert pool.evict(5) == [ids[0]]
    assert pool.evict(5) == []
    assert pool.registered == {ids[2]}
    pool.check()


def test_random_use_keeps_the_books() -> None:
    draw = random.Random(0)
    pool = BlockPool(20, 64)
    for _ in range(2000):
        owner = draw.choice("abcdef")
        action = draw.randrange(5)
        if action == 0:
            pool.free(owner)
        elif action == 1 and (held := pool.held_by(owner)):
            pool.register(draw.choice(held))
        elif action == 2:
            known = sorted(pool.registered - set(pool.held_by(owner)))
            pool.share(owner, draw.sample(known, min(len(known), 2)))
        elif action == 3:
            pool.evict(draw.randint(0, 3))
        elif (count := draw.randint(0, 4)) <= pool.num_free:
            pool.allocate(owner, count)
        else:
            with pytest.raises(PoolExhaustedError):
                pool.allocate(owner, count)
        pool.check()
        assert pool.num_free + pool.num_cached + pool.num_held == 20
