"""Forgetting on purpose: reset, discard, and what locks keep alive meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvcache import IntegrityError, NotEnoughEvictableError, RadixCache, SizeInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache import Int32Array

    MakeCache = Callable[[int], RadixCache]


def run(first: int, n: int) -> Int32Array:
    return np.arange(first, first + n, dtype=np.int32)


def unlock(cache: RadixCache, handle: object) -> list[int]:
    freed = cache.lock_handle(handle, unlock=True)  # type: ignore[arg-type]
    cache.check_integrity()
    return sorted(freed.tolist())


def test_reset_frees_everything_that_is_not_locked(make_cache: MakeCache):
    cache = make_cache(2)
    cache.insert_prefix(run(1, 4), run(0, 4))
    cache.insert_prefix(run(1, 2), run(4, 2), namespace=b"other")
    assert sorted(cache.reset().tolist()) == [0, 1, 2, 3, 4, 5]
    assert (cache.size_info, cache.node_count) == (SizeInfo(0, 0), 0)
    assert cache.match_prefix(run(1, 4)).cached_len == 0


def test_reset_of_an_empty_cache_frees_nothing(make_cache: MakeCache):
    assert make_cache(2).reset().tolist() == []


def test_a_locked_prefix_survives_a_reset_unseen_until_its_last_unlock(make_cache: MakeCache):
    cache = make_cache(1)
    cache.insert_prefix([1, 2], [1, 2])
    held = cache.insert_prefix([1, 2, 3], [1, 2, 3]).handle
    cache.insert_prefix([1, 2, 4], [1, 2, 4])
    cache.lock_handle(held)
    cache.lock_handle(held)
    assert cache.reset().tolist() == [4]
    cache.check_integrity()
    assert (held.attached, held.get_matched_indices().tolist()) == (False, [1, 2, 3])
    assert (cache.size_info, cache.node_count) == (SizeInfo(0, 3), 0)
    assert sorted(cache.held_slots().tolist()) == [1, 2, 3]
    assert cache.match_prefix([1, 2, 3]).cached_len == 0
    assert unlock(cache, held) == []
    assert unlock(cache, held) == [1, 2, 3]
    assert cache.size_info == SizeInfo(0, 0)


def test_each_unlock_after_a_reset_frees_what_no_other_lock_holds(make_cache: MakeCache):
    cache = make_cache(1)
    short = cache.insert_prefix([1], [1]).handle
    long = cache.insert_prefix([1, 2], [1, 2]).handle
    cache.lock_handle(short)
    cache.lock_handle(long)
    assert cache.reset().tolist() == []
    assert unlock(cache, long) == [2]
    assert unlock(cache, short) == [1]


def test_a_locked_orphan_can_be_locked_again_but_a_freed_one_cannot(make_cache: MakeCache):
    cache = make_cache(1)
    held = cache.insert_prefix([1], [1]).handle
    cache.lock_handle(held)
    cache.reset()
    cache.lock_handle(held)
    assert unlock(cache, held) == []
    assert unlock(cache, held) == [1]
    with pytest.raises(IntegrityError):
        cache.lock_handle(held)
    with pytest.raises(IntegrityError):
        cache.lock_handle(held, unlock=True)


def test_reset_detaches_every_handle_given_out_before_the_empty_prefix_too(make_cache: MakeCache):
    cache = make_cache(1)
    empty = cache.match_prefix([7]).handle
    found = cache.insert_prefix([1], [1]).handle
    locked = cache.insert_prefix([2], [2]).handle
    cache.lock_handle(locked)
    cache.lock_handle(empty)
    cache.reset()
    assert not any(handle.attached for handle in (empty, found, locked))
    assert cache.match_prefix([7]).handle.attached
    assert unlock(cache, empty) == []
    assert unlock(cache, locked) == [2]


def test_the_same_tokens_can_be_inserted_while_an_orphan_still_holds_its_own(make_cache: MakeCache):
    cache = make_cache(1)
    old = cache.insert_prefix([1, 2], [1, 2]).handle
    cache.lock_handle(old)
    cache.reset()
    fresh = cache.insert_prefix([1, 2], [11, 12])
    assert fresh.cached_len == 0
    assert cache.size_info == SizeInfo(2, 2)
    assert unlock(cache, old) == [1, 2]
    assert fresh.handle.get_matched_indices().tolist() == [11, 12]
    assert cache.size_info == SizeInfo(2, 0)


def test_orphans_are_never_evicted(make_cache: MakeCache):
    cache = make_cache(1)
    held = cache.insert_prefix([1, 2], [1, 2]).handle
    cache.lock_handle(held)
    cache.reset()
    with pytest.raises(NotEnoughEvictableError):
        cache.evict(1)
    assert unlock(cache, held) == [1, 2]


def test_discard_forgets_the_rest_of_the_path_with_all_that_extends_it(make_cache: MakeCache):
    cache = make_cache(1)
    cache.insert_prefix([1, 2], [1, 2])
    wrong = cache.insert_prefix([1, 2, 3, 4], [1, 2, 3, 4]).handle
    cache.insert_prefix([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    cache.insert_prefix([1, 2, 3, 6], [1, 2, 3, 6])
    cache.insert_prefix([1, 2, 7], [1, 2, 7])
    cache.insert_prefix([1, 8], [1, 8])
    assert sorted(cache.discard(wrong, 2).tolist()) == [3, 4, 5, 6]
    assert not wrong.attached
    assert cache.match_prefix([1, 2, 3, 4, 5]).cached_len == 2
    assert cache.match_prefix([1, 2, 7]).cached_len == 3
    assert cache.match_prefix([1, 8]).cached_len == 2


def test_discard_splits_the_node_it_falls_into_at_the_next_page(make_cache: MakeCache):
    cache = make_cache(4)
    wrong = cache.insert_prefix(run(1, 16), run(0, 16)).handle
    assert cache.discard(wrong, 5).tolist() == run(8, 8).tolist()
    assert cache.match_prefix(run(1, 16)).cached_len == 8
    assert (cache.size_info, cache.node_count) == (SizeInfo(8, 0), 1)


def test_discard_of_a_whole_prefix_drops_its_namespace(make_cache: MakeCache):
    cache = make_cache(1)
    wrong = cache.insert_prefix([1, 2], [1, 2], namespace=b"a").handle
    other = cache.insert_prefix([1, 2], [3, 4], namespace=b"b").handle
    assert cache.discard(wrong, 0).tolist() == [1, 2]
    assert cache.namespace_count == 1
    assert other.attached


def test_discard_of_nothing_beyond_changes_nothing(make_cache: MakeCache):
    cache = make_cache(2)
    handle = cache.insert_prefix(run(1, 4), run(0, 4)).handle
    cache.insert_prefix(run(1, 6), run(0, 6))
    empty = cache.match_prefix([9, 9]).handle
    for keep in (3, 4, 100):
        assert cache.discard(handle, keep).tolist() == []
    assert cache.discard(empty, 0).tolist() == []
    assert handle.attached
    assert cache.match_prefix(run(1, 6)).cached_len == 6


def test_discard_through_a_detached_handle_changes_nothing(make_cache: MakeCache):
    cache = make_cache(1)
    old = cache.insert_prefix([1, 2], [1, 2]).handle
    cache.lock_handle(old)
    cache.reset()
    cache.insert_prefix([1, 2], [3, 4])
    assert cache.discard(old, 0).tolist() == []
    assert cache.size_info == SizeInfo(2, 2)
    assert unlock(cache, old) == [1, 2]


def test_a_negative_length_to_keep_is_refused(make_cache: MakeCache):
    cache = make_cache(1)
    handle = cache.insert_prefix([1], [1]).handle
    with pytest.raises(ValueError, match="keep"):
        cache.discard(handle, -1)
    assert handle.attached


def test_what_a_discard_cuts_under_a_lock_comes_free_with_the_lock(make_cache: MakeCache):
    cache = make_cache(2)
    wrong = cache.insert_prefix(run(1, 8), run(0, 8)).handle
    reader = cache.insert_prefix([*run(1, 8), 50, 51], run(0, 10)).handle
    cache.lock_handle(wrong)
    cache.lock_handle(reader)
    cache.insert_prefix([*run(1, 8), 60, 61], [*run(0, 8), 20, 21])
    assert cache.discard(wrong, 4).tolist() == [20, 21]
    cache.check_integrity()
    assert cache.size_info == SizeInfo(0, 10)
    assert cache.match_prefix(run(1, 8)).cached_len == 4
    assert not reader.attached
    assert reader.get_matched_indices().tolist() == run(0, 10).tolist()
    assert unlock(cache, wrong) == []
    assert cache.size_info == SizeInfo(0, 10)
    assert unlock(cache, reader) == [4, 5, 6, 7, 8, 9]
    assert cache.size_info == SizeInfo(4, 0)


def test_what_stays_above_a_cut_is_protected_by_the_locks_below_it(make_cache: MakeCache):
    cache = make_cache(1)
    kept = cache.insert_prefix([1, 2], [1, 2]).handle
    wrong = cache.insert_prefix([1, 2, 3], [1, 2, 3]).handle
    cache.lock_handle(wrong)
    cache.discard(wrong, 2)
    with pytest.raises(NotEnoughEvictableError):
        cache.evict(1)
    assert kept.attached
    assert unlock(cache, wrong) == [3]
    assert cache.evict(2).tolist() == [1, 2]


def test_a_namespace_outlives_a_cut_at_its_root_while_locked(make_cache: MakeCache):
    cache = make_cache(1)
    wrong = cache.insert_prefix([1], [1], namespace=b"a").handle
    cache.lock_handle(wrong)
    cache.discard(wrong, 0)
    cache.check_integrity()
    fresh = cache.insert_prefix([1], [2], namespace=b"a")
    assert fresh.cached_len == 0
    assert unlock(cache, wrong) == [1]
    assert cache.match_prefix([1], namespace=b"a").cached_len == 1
    cache.evict(1)
    assert cache.namespace_count == 0


def test_a_namespace_that_only_a_lock_kept_goes_with_the_lock(make_cache: MakeCache):
    cache = make_cache(1)
    wrong = cache.insert_prefix([1], [1], namespace=b"a").handle
    cache.lock_handle(wrong)
    cache.discard(wrong, 0)
    empty = cache.match_prefix([1], namespace=b"a").handle
    assert unlock(cache, wrong) == [1]
    assert cache.namespace_count == 0
    cache.lock_handle(empty)
    assert empty.attached
    assert unlock(cache, empty) == []


def test_a_reset_after_a_discard_keeps_both_orphans_until_their_unlock(make_cache: MakeCache):
    cache = make_cache(1)
    upper = cache.insert_prefix([1], [1]).handle
    lower = cache.insert_prefix([1, 2], [1, 2]).handle
    cache.lock_handle(upper)
    cache.lock_handle(lower)
    cache.discard(lower, 1)
    assert cache.reset().tolist() == []
    cache.check_integrity()
    assert unlock(cache, upper) == []
    assert unlock(cache, lower) == [1, 2]
