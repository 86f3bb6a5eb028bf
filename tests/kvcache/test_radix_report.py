"""What the cache tells about itself: counters, hot prefixes, memory; and forgetting one namespace."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import RadixCache, SizeInfo


def test_lookups_and_hits_are_counted_in_tokens():
    cache = RadixCache(2, policy="lru")
    cache.insert_prefix([1, 2, 3, 4, 5], [0, 1, 2, 3, 4])
    cache.match_prefix([1, 2, 9])
    cache.admit(np.array([1, 2, 3, 4, 5, 6], np.int32), np.zeros(3, np.int32))
    cache.peek_prefix([1, 2])
    stats = cache.stats()
    assert (stats.lookups, stats.lookup_tokens, stats.hit_tokens, stats.inserted_tokens) == (2, 9, 6, 4)
    assert (stats.nodes, stats.namespaces, stats.evicted_pages) == (2, 1, (0,))


def test_what_is_forgotten_on_purpose_does_not_count_as_evicted():
    cache = RadixCache(1, policy="lru")
    cache.discard(cache.insert_prefix([1, 2], [1, 2]).handle, 1)
    cache.evict(1)
    cache.insert_prefix([1, 2], [1, 2])
    cache.reset()
    assert cache.stats().evicted_pages == (1,)


def test_the_most_matched_prefixes_come_first_and_the_longer_of_equals():
    cache = RadixCache(1)
    cache.insert_prefix([1, 2, 3], [10, 11, 12], namespace=b"a")
    cache.insert_prefix([5], [13])
    cache.insert_prefix([6], [14])
    for _ in range(3):
        cache.match_prefix([1, 2], namespace=b"a")
    cache.match_prefix([1], namespace=b"a")
    cache.match_prefix([5])
    hottest = cache.top_prefixes(2)
    assert [(p.namespace, p.ids.tolist(), p.pages.tolist(), p.hits) for p in hottest] == [
        (b"a", [1], [10], 4),
        (b"a", [1, 2], [10, 11], 3),
    ]
    assert [prefix.ids.tolist() for prefix in cache.top_prefixes(100)] == [[1], [1, 2], [5]]
    assert cache.top_prefixes(0) == []
    with pytest.raises(ValueError, match="negative"):
        cache.top_prefixes(-1)


def test_a_prefix_whose_every_match_went_further_is_left_out():
    cache = RadixCache(2)
    cache.insert_prefix([1, 2], [0, 1])
    cache.insert_prefix([1, 2, 3, 4], [0, 1, 2, 3])
    for _ in range(2):
        cache.match_prefix([1, 2, 3, 4])
    (hottest,) = cache.top_prefixes(5)
    assert (hottest.ids.tolist(), hottest.pages.tolist(), hottest.hits) == ([1, 2, 3, 4], [0, 1], 2)


def test_one_namespace_is_forgotten_and_the_others_stay():
    cache = RadixCache(1)
    kept = cache.insert_prefix([1], [1], namespace=b"kept").handle
    gone = cache.insert_prefix([1, 2], [3, 4], namespace=b"gone").handle
    locked = cache.insert_prefix([1, 5], [3, 6], namespace=b"gone").handle
    empty = cache.match_prefix([9], namespace=b"gone").handle
    cache.lock_handle(locked)
    assert cache.reset(b"gone").tolist() == [4]
    cache.check_integrity()
    assert [handle.attached for handle in (kept, gone, locked, empty)] == [True, False, False, True]
    assert cache.peek_prefix([1], namespace=b"gone") == 0
    assert cache.size_info == SizeInfo(1, 2)
    assert cache.insert_prefix([1], [8], namespace=b"gone").cached_len == 0
    assert sorted(cache.lock_handle(locked, unlock=True).tolist()) == [3, 6]
    assert cache.reset(b"unknown").tolist() == []
    assert (cache.namespace_count, cache.size_info) == (2, SizeInfo(2, 0))


def test_a_peek_changes_nothing():
    cache = RadixCache(1)
    cache.insert_prefix([1, 2], [1, 2])
    cache.insert_prefix([3], [3])
    before = cache.stats()
    assert (cache.peek_prefix([1, 9]), cache.peek_prefix([4]), cache.peek_prefix([1, 2, 3])) == (1, 0, 2)
    assert cache.stats() == before
    assert cache.evict(3).tolist() == [1, 2, 3]
