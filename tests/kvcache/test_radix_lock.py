"""Locking reclassifies and nothing else: the rows of the lock table, before and after a split."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvcache import IntegrityError, NaiveCache, NotEnoughEvictableError, RadixCache, SizeInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache import Handle

    MakeCache = Callable[[int], RadixCache]

IDS = np.arange(1, 13, dtype=np.int32)
SLOTS = np.arange(12, dtype=np.int32)


@pytest.fixture
def cache(make_cache: MakeCache) -> RadixCache:
    return make_cache(2)


@pytest.fixture
def path(cache: RadixCache) -> list[Handle]:
    """Handles to three nodes of four tokens, one below the other."""
    handles = [cache.insert_prefix(IDS[:n], SLOTS[:n]).handle for n in (4, 8, 12)]
    assert cache.node_count == 3
    return handles


@pytest.fixture
def split_path(cache: RadixCache, path: list[Handle]) -> list[Handle]:
    """The same path under one lock of its end, its middle node split in two: ends at 4, 6, 8 and 12."""
    cache.lock_handle(path[2])
    inner = cache.match_prefix(IDS[:6]).handle
    assert cache.node_count == 4
    assert cache.size_info == SizeInfo(0, 12)
    return [path[0], inner, path[1], path[2]]


def lock(cache: RadixCache, handle: Handle) -> SizeInfo:
    assert cache.lock_handle(handle).tolist() == []
    cache.check_integrity()
    return cache.size_info


def unlock(cache: RadixCache, handle: Handle) -> SizeInfo:
    assert cache.lock_handle(handle, unlock=True).tolist() == []
    cache.check_integrity()
    return cache.size_info


def test_the_matched_node_itself_is_protected_while_locked(make_cache: MakeCache):
    cache = make_cache(1)
    cache.insert_prefix([1, 2, 3, 4], [0, 1, 2, 3])
    handle = cache.match_prefix([1, 2, 3, 4]).handle
    cache.lock_handle(handle)
    with pytest.raises(NotEnoughEvictableError):
        cache.evict(4)
    assert cache.match_prefix([1, 2, 3, 4]).cached_len == 4
    cache.lock_handle(handle, unlock=True)
    assert cache.evict(4).tolist() == [0, 1, 2, 3]


def test_the_first_lock_protects_the_whole_path(cache: RadixCache, path: list[Handle]):
    assert lock(cache, path[2]) == SizeInfo(0, 12)


def test_the_first_lock_of_an_inner_node_leaves_what_extends_it_evictable(cache: RadixCache, path: list[Handle]):
    assert lock(cache, path[1]) == SizeInfo(4, 8)
    assert lock(cache, path[2]) == SizeInfo(0, 12)


def test_a_further_lock_moves_nothing(cache: RadixCache, path: list[Handle]):
    lock(cache, path[2])
    assert lock(cache, path[2]) == SizeInfo(0, 12)
    assert lock(cache, path[0]) == SizeInfo(0, 12)


def test_the_last_unlock_makes_the_path_evictable_again(cache: RadixCache, path: list[Handle]):
    lock(cache, path[2])
    assert unlock(cache, path[2]) == SizeInfo(12, 0)


def test_an_unlock_that_is_not_the_last_moves_nothing(cache: RadixCache, path: list[Handle]):
    lock(cache, path[2])
    lock(cache, path[2])
    assert unlock(cache, path[2]) == SizeInfo(0, 12)


def test_an_unlock_frees_only_what_no_other_lock_holds(cache: RadixCache, path: list[Handle]):
    lock(cache, path[2])
    lock(cache, path[0])
    assert unlock(cache, path[2]) == SizeInfo(8, 4)
    assert unlock(cache, path[0]) == SizeInfo(12, 0)


def test_a_first_lock_below_a_split_protects_both_halves(cache: RadixCache, path: list[Handle]):
    cache.match_prefix(IDS[:6])
    assert cache.size_info == SizeInfo(12, 0)
    assert lock(cache, path[1]) == SizeInfo(4, 8)


def test_a_further_lock_moves_nothing_after_a_split(cache: RadixCache, split_path: list[Handle]):
    for handle in split_path:
        assert lock(cache, handle) == SizeInfo(0, 12)


def test_the_last_unlock_reaches_both_halves_of_a_split(cache: RadixCache, split_path: list[Handle]):
    assert unlock(cache, split_path[3]) == SizeInfo(12, 0)


def test_an_unlock_that_is_not_the_last_moves_nothing_after_a_split(cache: RadixCache, split_path: list[Handle]):
    lock(cache, split_path[3])
    assert unlock(cache, split_path[3]) == SizeInfo(0, 12)


def test_the_upper_half_of_a_split_can_be_held_alone(cache: RadixCache, split_path: list[Handle]):
    lock(cache, split_path[1])
    assert unlock(cache, split_path[3]) == SizeInfo(6, 6)
    assert unlock(cache, split_path[1]) == SizeInfo(12, 0)


def test_splitting_a_locked_leaf_moves_its_lock_to_neither_half_alone(cache: RadixCache, path: list[Handle]):
    lock(cache, path[2])
    inner = cache.match_prefix(IDS[:10]).handle
    assert cache.size_info == SizeInfo(0, 12)
    with pytest.raises(IntegrityError):
        cache.lock_handle(inner, unlock=True)
    assert unlock(cache, path[2]) == SizeInfo(12, 0)


def test_a_new_leaf_below_a_locked_node_is_evictable(cache: RadixCache, path: list[Handle]):
    lock(cache, path[2])
    cache.insert_prefix([*IDS, 50, 51], [*SLOTS, 12, 13])
    assert cache.size_info == SizeInfo(2, 12)
    assert cache.evict(2).tolist() == [12, 13]


def test_the_empty_prefix_can_be_locked_and_unlocked(cache: RadixCache, path: list[Handle]):
    del path
    empty = cache.match_prefix([99, 99]).handle
    assert lock(cache, empty) == SizeInfo(12, 0)
    assert unlock(cache, empty) == SizeInfo(12, 0)
    with pytest.raises(IntegrityError):
        cache.lock_handle(empty, unlock=True)


def test_unlocking_what_is_not_locked_is_refused_and_changes_nothing(cache: RadixCache, path: list[Handle]):
    with pytest.raises(IntegrityError):
        cache.lock_handle(path[2], unlock=True)
    assert cache.size_info == SizeInfo(12, 0)


def test_a_lock_of_what_extends_a_prefix_does_not_pass_for_a_lock_of_the_prefix(cache: RadixCache, path: list[Handle]):
    lock(cache, path[2])
    with pytest.raises(IntegrityError):
        cache.lock_handle(path[0], unlock=True)
    assert cache.size_info == SizeInfo(0, 12)


def test_locking_what_was_evicted_is_refused(cache: RadixCache, path: list[Handle]):
    cache.evict(2)
    with pytest.raises(IntegrityError):
        cache.lock_handle(path[2])
    with pytest.raises(IntegrityError):
        path[2].get_matched_indices()
    assert not path[2].attached
    assert cache.size_info == SizeInfo(10, 0)


def test_a_handle_of_another_kind_of_cache_is_a_type_error(cache: RadixCache):
    foreign = NaiveCache(2).match_prefix([1, 2]).handle
    with pytest.raises(TypeError):
        cache.lock_handle(foreign)
    with pytest.raises(TypeError):
        cache.discard(foreign, 0)
