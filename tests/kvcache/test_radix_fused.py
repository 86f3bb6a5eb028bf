"""The calls of the serving path: what each does in one crossing, and what it refuses before anything changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvcache import IntegrityError, NaiveCache, RadixCache, SizeInfo

if TYPE_CHECKING:
    from kvcache import Int32Array


def run(first: int, n: int) -> Int32Array:
    return np.arange(first, first + n, dtype=np.int32)


def row_of(*pages: int) -> Int32Array:
    return np.array(pages, np.int32)


@pytest.fixture
def cache() -> RadixCache:
    """Pages of two tokens; [1, 2, 3, 4] is cached in pages 7 and 8."""
    cache = RadixCache(2)
    cache.insert_prefix([1, 2, 3, 4], [14, 15, 16, 17])
    return cache


def state(cache: RadixCache) -> tuple[object, ...]:
    cache.check_integrity()
    return cache.size_info, cache.node_count, cache.namespace_count, cache.stats(), sorted(cache.held_slots().tolist())


def test_an_admission_locks_what_it_finds_and_writes_its_pages_and_no_more(cache: RadixCache):
    row = row_of(-1, -1, -1)
    handle = cache.admit(np.array([1, 2, 3, 4, 5, 6], np.int32), row)
    assert handle is not None
    assert (handle.cached_len, row.tolist()) == (4, [7, 8, -1])
    assert cache.size_info == SizeInfo(0, 4)
    assert cache.unlock_pages(handle).tolist() == []
    assert cache.size_info == SizeInfo(4, 0)


@pytest.mark.parametrize(("required", "admitted"), [(0, True), (3, True), (4, False), (100, False)])
def test_an_admission_counts_what_stays_evictable_beside_what_it_locks(
    cache: RadixCache, required: int, admitted: bool
):
    cache.insert_prefix([9, 9], [2, 3])
    cache.lock_handle(cache.insert_prefix([8, 8], [4, 5]).handle)
    before = state(cache)
    handle = cache.admit(run(1, 4), row_of(0, 0), required=required)
    assert (handle is not None) == admitted
    if not admitted:
        assert state(cache) == before


def test_a_refused_admission_is_no_use_and_splits_nothing(cache: RadixCache):
    cache.insert_prefix([9, 9], [2, 3])
    before = state(cache)
    assert cache.admit(np.array([1, 2], np.int32), row_of(0), required=100) is None
    assert state(cache) == before
    assert cache.evict(4).tolist() == [14, 15, 16, 17]


def test_a_commit_exchanges_duplicates_gives_the_rest_and_moves_the_lock(cache: RadixCache):
    ids, row = run(1, 9), row_of(-1, 20, 21, 22, 23)
    handle = cache.admit(ids[:2], row)
    assert handle is not None
    freed = cache.commit(ids, row, handle)
    assert freed.tolist() == [20]
    assert row.tolist() == [7, 8, 21, 22, 23]
    assert (handle.cached_len, cache.size_info) == (8, SizeInfo(0, 8))
    assert cache.finish(ids, row, handle).tolist() == []
    assert cache.size_info == SizeInfo(8, 0)
    assert cache.match_prefix(ids).handle.get_matched_indices()[::2].tolist() == [14, 16, 42, 44]


def test_a_finish_leaves_the_handle_at_the_end_of_what_was_kept(cache: RadixCache):
    ids, row = run(1, 7), row_of(-1, -1, 21, 22)
    handle = cache.admit(ids[:-1], row)
    assert handle is not None
    assert cache.finish(ids, row, handle).tolist() == []
    assert (handle.cached_len, handle.get_matched_pages().tolist()) == (6, [7, 8, 21])
    assert cache.size_info == SizeInfo(6, 0)
    with pytest.raises(IntegrityError):
        cache.finish(ids, row, handle)


def test_two_requests_that_computed_the_same_share_the_first_ones_pages(cache: RadixCache):
    ids, rows = run(1, 8), [row_of(-1, -1, 20, 21), row_of(-1, -1, 30, 31)]
    handles = [cache.admit(ids[:-1], row) for row in rows]
    assert cache.commit(ids, rows[0], handles[0]).tolist() == []
    assert cache.commit(ids, rows[1], handles[1]).tolist() == [30, 31]
    assert rows[0].tolist() == rows[1].tolist() == [7, 8, 20, 21]
    for row, handle in zip(rows, handles, strict=True):
        assert cache.finish(ids, row, handle).tolist() == []
    assert cache.size_info == SizeInfo(8, 0)


def test_a_request_that_found_nothing_commits_into_its_namespace(cache: RadixCache):
    ids, row = run(1, 4), row_of(30, 31)
    handle = cache.admit(ids, row, namespace=b"other")
    assert handle is not None
    assert (handle.cached_len, row.tolist()) == (0, [30, 31])
    assert cache.commit(ids, row, handle, namespace=b"other").tolist() == []
    assert cache.peek_prefix(ids, namespace=b"other") == 4
    assert cache.finish(ids, row, handle, namespace=b"other").tolist() == []
    assert (cache.namespace_count, cache.size_info) == (2, SizeInfo(8, 0))


def test_ids_that_end_before_the_handle_commit_nothing(cache: RadixCache):
    ids, row = run(1, 5), row_of(-1, -1, 20)
    handle = cache.admit(ids[:-1], row)
    for n in (0, 2, 5):
        assert cache.commit(ids[:n], row, handle).tolist() == []
    assert (handle.cached_len, cache.size_info) == (4, SizeInfo(0, 4))
    assert cache.finish(ids[:0], row, handle).tolist() == []


def test_a_detached_handle_commits_nothing_and_its_pages_come_free_with_its_end(cache: RadixCache):
    ids, row = run(1, 8), row_of(-1, -1, 20, 21)
    handle = cache.admit(ids[:4], row)
    cache.reset()
    assert cache.commit(ids, row, handle).tolist() == []
    assert cache.finish(ids, row, handle).tolist() == [7, 8]
    assert (cache.size_info, row.tolist()) == (SizeInfo(0, 0), [7, 8, 20, 21])


def test_an_unlock_in_pages_gives_what_the_unlock_in_slots_would(cache: RadixCache):
    handle = cache.admit(run(1, 4), row_of(-1, -1))
    cache.reset()
    assert cache.unlock_pages(handle).tolist() == [7, 8]


def test_eviction_in_pages_gives_the_pages_that_eviction_in_slots_would(cache: RadixCache):
    assert cache.evict_pages(1).tolist() == [8]
    assert cache.evict_pages(0).tolist() == []
    with pytest.raises(ValueError, match="negative"):
        cache.evict_pages(-1)
    with pytest.raises(ValueError, match="evictable"):
        cache.evict_pages(2)
    assert cache.evictable_pages == 1


def test_rows_may_be_rows_of_a_page_table(cache: RadixCache):
    table = np.full((2, 4), -1, np.int32)
    handle = cache.admit(run(1, 4), table[1])
    assert handle is not None
    assert table.tolist() == [[-1] * 4, [7, 8, -1, -1]]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ([0, 0], TypeError),
        (np.zeros(4, np.int64), TypeError),
        (np.zeros((2, 2), np.int32), TypeError),
        (np.zeros(8, np.int32)[::2], TypeError),
        (np.zeros(4, ">i4"), TypeError),
        (np.zeros(1, np.int32), ValueError),
    ],
)
def test_a_row_that_cannot_be_written_in_place_is_refused_before_anything_changes(
    cache: RadixCache, row: object, error: type
):
    handle = cache.admit(run(1, 2), row_of(-1))
    before = state(cache)
    with pytest.raises(error, match="row"):
        cache.admit(run(1, 4), row)  # type: ignore[arg-type]
    with pytest.raises(error, match="row"):
        cache.commit(run(1, 4), row, handle)  # type: ignore[arg-type]
    assert state(cache) == before


def test_a_row_that_is_read_only_is_refused(cache: RadixCache):
    row = row_of(0, 0)
    row.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        cache.admit(run(1, 4), row)


@pytest.mark.parametrize("page", [-1, 2**30, 2**31 - 1])
def test_a_page_whose_slots_are_no_int32_is_refused_before_anything_changes(cache: RadixCache, page: int):
    handle = cache.admit(run(1, 4), row := row_of(-1, -1, page))
    before = state(cache)
    with pytest.raises(ValueError, match="page"):
        cache.commit(run(1, 6), row, handle)
    assert state(cache) == before


def test_ids_that_do_not_continue_the_handle_are_refused_before_anything_changes(cache: RadixCache):
    handle = cache.admit(run(1, 4), row := row_of(-1, -1, 20))
    before = state(cache)
    with pytest.raises(ValueError, match="continue"):
        cache.commit(run(2, 6), row, handle)
    assert state(cache) == before


def test_a_handle_that_is_not_locked_commits_nothing(cache: RadixCache):
    handle = cache.match_prefix(run(1, 4)).handle
    before = state(cache)
    with pytest.raises(IntegrityError):
        cache.commit(run(1, 6), row_of(7, 8, 20), handle)
    assert state(cache) == before


def test_a_handle_of_another_cache_is_refused(cache: RadixCache):
    other = RadixCache(2).match_prefix(run(1, 4)).handle
    foreign = NaiveCache(2).match_prefix(run(1, 4)).handle
    for handle, error in [(other, ValueError), (foreign, TypeError)]:
        for call in (cache.lock_handle, cache.unlock_pages, lambda handle: cache.discard(handle, 0)):
            with pytest.raises(error):
                call(handle)
        with pytest.raises(error):
            cache.commit(run(1, 4), row_of(0, 0), handle)


def test_a_handle_keeps_its_cache_alive():
    handle = RadixCache(1).insert_prefix([1, 2], [5, 6]).handle
    assert handle.get_matched_indices().tolist() == [5, 6]


def test_arrays_that_are_not_aligned_are_read_right(cache: RadixCache):
    data = bytearray(1) + run(1, 4).tobytes()
    assert cache.match_prefix(np.frombuffer(data, np.int32, offset=1)).cached_len == 4


# Many at once.


def test_many_peeks_give_what_single_ones_do(cache: RadixCache):
    ids = [run(1, 2), run(1, 9), run(2, 4), run(1, 4)]
    lengths = cache.peek_prefixes(ids, [b"", b"", b"", b"other"])
    assert lengths.tolist() == [2, 4, 0, 0]
    assert cache.node_count == 1


def test_many_requests_are_admitted_and_settled_in_one_call(cache: RadixCache):
    ids, rows = [run(1, 8), run(1, 8), run(50, 4)], [row_of(-1, -1, 20, 21), row_of(-1, -1, 30, 31), row_of(40, 41)]
    names = [b"", b"", b"other"]
    handles = cache.admit_all([one[:-1] for one in ids], rows, names)
    assert [handle.cached_len for handle in handles] == [4, 4, 0]
    assert cache.commit_all(ids, rows, handles, names, [False, True, True]).tolist() == [30, 31]
    assert [handle.cached_len for handle in handles] == [8, 8, 4]
    assert cache.size_info == SizeInfo(4, 8)
    assert cache.unlock_pages(handles[0]).tolist() == []


def test_one_wrong_request_of_many_stops_all_before_anything_changes(cache: RadixCache):
    ids, rows = [run(1, 6), run(1, 6)], [row_of(-1, -1, 20), row_of(-1, -1, 30)]
    with pytest.raises(ValueError, match="row 1"):
        cache.admit_all(ids, [rows[0], rows[1][:2]], [b"", b""])
    with pytest.raises(ValueError, match="namespaces"):
        cache.admit_all(ids, rows, [b""])
    assert cache.size_info == SizeInfo(4, 0)
    handles = cache.admit_all(ids, rows, [b"", b""])
    before = state(cache)
    for wrong, error in [([run(1, 6), run(2, 6)], "continue"), ([run(1, 6), run(1, 8)], "row")]:
        with pytest.raises(ValueError, match=error):
            cache.commit_all(wrong, rows, handles, [b"", b""], [True, True])
    with pytest.raises(ValueError, match="twice"):
        cache.commit_all(ids, rows, [handles[0], handles[0]], [b"", b""], [True, True])
    assert state(cache) == before
