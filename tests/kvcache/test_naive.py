from __future__ import annotations

import numpy as np
import pytest

from kvcache import IntegrityError, NaiveCache, NotEnoughEvictableError, RadixCache, SizeInfo


@pytest.fixture
def cache() -> NaiveCache:
    return NaiveCache(2)


def test_what_was_inserted_stays_the_callers_and_is_never_matched(cache: NaiveCache):
    inserted = cache.insert_prefix([1, 2, 3, 4], [0, 1, 2, 3])
    match = cache.match_prefix([1, 2, 3, 4])
    assert (inserted.cached_len, inserted.handle.cached_len) == (0, 0)
    assert (match.cached_len, match.handle.cached_len) == (0, 0)
    assert match.handle.get_matched_indices().tolist() == []
    assert match.handle.get_matched_indices().dtype == np.int32


def test_it_holds_nothing_whatever_is_done(cache: NaiveCache):
    handle = cache.insert_prefix([1, 2], [0, 1], namespace=b"a").handle
    assert cache.lock_handle(handle).tolist() == []
    assert cache.reset().tolist() == []
    assert cache.discard(handle, 0).tolist() == []
    assert cache.lock_handle(handle, unlock=True).tolist() == []
    assert handle.attached
    assert (cache.size_info, cache.node_count) == (SizeInfo(0, 0), 0)
    assert cache.held_slots().tolist() == []
    cache.check_integrity()


def test_nothing_is_evictable(cache: NaiveCache):
    assert cache.evict(0).tolist() == []
    with pytest.raises(NotEnoughEvictableError):
        cache.evict(1)


def test_locks_count(cache: NaiveCache):
    handle = cache.match_prefix([1]).handle
    cache.lock_handle(handle)
    cache.lock_handle(handle)
    cache.lock_handle(handle, unlock=True)
    cache.lock_handle(handle, unlock=True)
    with pytest.raises(IntegrityError):
        cache.lock_handle(handle, unlock=True)
    with pytest.raises(IntegrityError):
        cache.lock_handle(cache.match_prefix([1]).handle, unlock=True)


def test_it_refuses_what_the_radix_cache_refuses():
    for cache in (NaiveCache(2), RadixCache(2)):
        with pytest.raises(TypeError):
            cache.match_prefix([0.5])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="slots"):
            cache.insert_prefix([1, 2], [1, 2])
        with pytest.raises(ValueError, match="2 ids but 4 slots"):
            cache.insert_prefix([1, 2], [0, 1, 2, 3])
        with pytest.raises(ValueError, match="negative"):
            cache.evict(-1)
        with pytest.raises(ValueError, match="negative"):
            cache.discard(cache.match_prefix([1]).handle, -1)
    with pytest.raises(ValueError, match="page_size"):
        NaiveCache(0)
    with pytest.raises(TypeError):
        NaiveCache(2).lock_handle(RadixCache(2).match_prefix([1]).handle)
