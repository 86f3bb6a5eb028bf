"""Eviction: how much, in which order, and that the pages which come back are whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvcache import NotEnoughEvictableError, PageAllocator, RadixCache, SizeInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache import Int32Array

    MakeCache = Callable[[int], RadixCache]

every_page_size = pytest.mark.parametrize("page_size", [1, 4, 16])


def run(first: int, n: int) -> Int32Array:
    return np.arange(first, first + n, dtype=np.int32)


def slots_of(pages: Int32Array, page_size: int) -> Int32Array:
    return (pages[:, None] * page_size + np.arange(page_size, dtype=np.int32)).reshape(-1)


def pages_of(slots: Int32Array, page_size: int) -> Int32Array:
    return slots[::page_size] // page_size


def fill(cache: RadixCache, allocator: PageAllocator, prompts: int, pages: int) -> None:
    """Inserts that many prompts of that many pages, all different."""
    n = pages * cache.page_size
    for prompt in range(prompts):
        slots = slots_of(allocator.allocate(pages), cache.page_size)
        cache.insert_prefix(run(1000 * prompt, n), slots)


@every_page_size
def test_allocate_after_evict_returns_page_aligned(make_cache: MakeCache, page_size: int):
    cache, allocator = make_cache(page_size), PageAllocator(12)
    fill(cache, allocator, prompts=4, pages=3)
    for asked in (1, page_size, page_size + 1, 3 * page_size):
        freed = cache.evict(asked)
        assert len(freed) == -(-asked // page_size) * page_size
        pages = pages_of(freed, page_size)
        assert freed.tolist() == slots_of(pages, page_size).tolist()
        allocator.free(pages)
        allocator.check_integrity()
        again = allocator.allocate(len(pages))
        assert sorted(again.tolist()) == sorted(pages.tolist())
        assert set(slots_of(again, page_size).tolist()).isdisjoint(cache.held_slots().tolist())
        cache.check_integrity()


@every_page_size
def test_consecutive_allocations_after_evict_no_overlap(make_cache: MakeCache, page_size: int):
    cache, allocator = make_cache(page_size), PageAllocator(12)
    fill(cache, allocator, prompts=4, pages=3)
    allocator.free(pages_of(cache.evict(5 * page_size), page_size))
    first = slots_of(allocator.allocate(2), page_size)
    second = slots_of(allocator.allocate(2), page_size)
    allocator.free(pages_of(cache.evict(2 * page_size), page_size))
    third = slots_of(allocator.allocate(3), page_size)
    owners = [set(slots.tolist()) for slots in (first, second, third, cache.held_slots())]
    assert set.union(*owners) == set(range(12 * page_size))
    assert sum(len(owner) for owner in owners) == 12 * page_size
    allocator.check_integrity()


def test_evicting_nothing_frees_nothing(make_cache: MakeCache):
    cache = make_cache(4)
    assert cache.evict(0).tolist() == []
    cache.insert_prefix(run(1, 4), run(0, 4))
    assert cache.evict(0).tolist() == []
    assert cache.size_info == SizeInfo(4, 0)


def test_a_negative_number_of_tokens_is_refused(make_cache: MakeCache):
    with pytest.raises(ValueError, match="negative"):
        make_cache(4).evict(-1)


@every_page_size
def test_exactly_what_was_asked_is_evicted_in_whole_pages_from_the_tail(make_cache: MakeCache, page_size: int):
    cache = make_cache(page_size)
    n = 5 * page_size
    cache.insert_prefix(run(1, n), run(0, n))
    assert cache.evict(page_size + 1).tolist() == run(3 * page_size, 2 * page_size).tolist()
    assert cache.size_info == SizeInfo(3 * page_size, 0)
    assert cache.node_count == 1
    match = cache.match_prefix(run(1, n))
    assert match.handle.get_matched_indices().tolist() == run(0, 3 * page_size).tolist()


def test_the_last_leaf_taken_is_trimmed_and_those_before_it_go_whole(make_cache: MakeCache):
    cache = make_cache(2)
    cache.insert_prefix([1, 2, 3, 4], [0, 1, 2, 3])
    cache.insert_prefix([5, 6, 7, 8], [4, 5, 6, 7])
    assert cache.evict(6).tolist() == [0, 1, 2, 3, 6, 7]
    assert cache.match_prefix([5, 6, 7, 8]).cached_len == 2


def test_a_trimmed_leaf_keeps_its_place_in_the_order(make_cache: MakeCache):
    cache = make_cache(1)
    cache.insert_prefix([1, 2], [0, 1])
    cache.insert_prefix([3, 4], [2, 3])
    assert cache.evict(1).tolist() == [1]
    assert cache.evict(2).tolist() == [0, 3]


def test_the_least_recently_used_leaf_goes_first(make_cache: MakeCache):
    cache = make_cache(1)
    for first in (10, 20, 30):
        cache.insert_prefix([first], [first])
    cache.match_prefix([10])
    cache.insert_prefix([20], [99])
    assert [cache.evict(1).item() for _ in range(3)] == [30, 10, 20]


def test_a_parent_goes_after_its_children_at_an_age_of_its_own(make_cache: MakeCache):
    cache = make_cache(1)
    cache.insert_prefix([1], [1])
    cache.insert_prefix([1, 2], [1, 2])
    cache.insert_prefix([9], [9])
    cache.insert_prefix([8], [8])
    cache.match_prefix([1])
    assert [cache.evict(1).item() for _ in range(4)] == [2, 9, 8, 1]


def test_a_parent_that_becomes_a_leaf_is_taken_in_the_same_call(make_cache: MakeCache):
    cache = make_cache(1)
    for n in (1, 2, 3):
        cache.insert_prefix(run(1, n), run(1, n))
    cache.insert_prefix([9], [9])
    assert cache.evict(3).tolist() == [3, 2, 1]
    assert cache.match_prefix([9]).cached_len == 1


def test_only_the_part_of_a_node_that_matched_becomes_recent(make_cache: MakeCache):
    cache = make_cache(1)
    cache.insert_prefix([1, 2, 3, 4], [1, 2, 3, 4])
    cache.insert_prefix([9], [9])
    cache.match_prefix([1, 2])
    assert [cache.evict(1).item() for _ in range(5)] == [4, 3, 9, 2, 1]


def test_a_failed_lookup_makes_nothing_recent(make_cache: MakeCache):
    cache = make_cache(2)
    cache.insert_prefix([1, 2], [0, 1])
    cache.insert_prefix([3, 4], [2, 3])
    cache.match_prefix([1, 9])
    cache.match_prefix([1])
    cache.match_prefix([1, 2], namespace=b"other")
    assert cache.evict(2).tolist() == [0, 1]


def test_the_order_does_not_stop_at_namespaces(make_cache: MakeCache):
    cache = make_cache(1)
    for slot, name in enumerate([b"a", b"b", b"a", b"c"]):
        cache.insert_prefix([slot], [slot], namespace=name)
    cache.match_prefix([1], namespace=b"b")
    assert cache.evict(4).tolist() == [0, 2, 3, 1]


def test_locked_prefixes_are_passed_over(make_cache: MakeCache):
    cache = make_cache(1)
    oldest = cache.insert_prefix([1, 2], [1, 2]).handle
    cache.insert_prefix([1, 2, 3], [1, 2, 3])
    cache.insert_prefix([9], [9])
    cache.lock_handle(oldest)
    assert cache.evict(2).tolist() == [3, 9]
    assert cache.size_info == SizeInfo(0, 2)
    assert oldest.get_matched_indices().tolist() == [1, 2]


@pytest.mark.parametrize("asked", [5, 6, 7, 1000])
def test_more_than_is_evictable_is_an_error_before_anything_changes(make_cache: MakeCache, asked: int):
    cache = make_cache(2)
    cache.insert_prefix([1, 2, 3, 4], [0, 1, 2, 3])
    cache.lock_handle(cache.insert_prefix([5, 6], [4, 5]).handle)
    before = cache.size_info, cache.node_count, cache.held_slots().tolist()
    with pytest.raises(NotEnoughEvictableError):
        cache.evict(asked)
    assert (cache.size_info, cache.node_count, cache.held_slots().tolist()) == before
    assert cache.match_prefix([1, 2, 3, 4]).cached_len == 4


def test_the_slots_that_came_free_are_the_callers_copy(make_cache: MakeCache):
    cache = make_cache(1)
    cache.insert_prefix([1, 2, 3], [1, 2, 3])
    cache.evict(1)[:] = -1
    assert cache.held_slots().tolist() == [1, 2]
