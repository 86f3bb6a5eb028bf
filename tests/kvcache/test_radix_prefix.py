"""Matching and inserting: what is found, what is kept, what stays the caller's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvcache import RadixCache, SizeInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeCache = Callable[[int], RadixCache]

every_page_size = pytest.mark.parametrize("page_size", [1, 4, 16])


def run(first: int, n: int) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.int32)


def test_a_page_holds_at_least_one_token():
    with pytest.raises(ValueError, match="page_size"):
        RadixCache(0)


def test_an_empty_cache_matches_the_empty_prefix(make_cache: MakeCache):
    cache = make_cache(4)
    match = cache.match_prefix([1, 2, 3, 4])
    assert (match.cached_len, match.handle.cached_len, match.handle.attached) == (0, 0, True)
    assert match.handle.get_matched_indices().tolist() == []
    assert (cache.size_info, cache.node_count) == (SizeInfo(0, 0), 0)
    assert cache.held_slots().tolist() == []


@every_page_size
def test_what_was_inserted_is_matched_with_its_slots(make_cache: MakeCache, page_size: int):
    cache = make_cache(page_size)
    n = 3 * page_size
    inserted = cache.insert_prefix(run(100, n), run(7 * page_size, n))
    match = cache.match_prefix(run(100, n + page_size))
    assert (inserted.cached_len, inserted.handle.cached_len) == (0, n)
    assert (match.cached_len, match.handle.cached_len) == (n, n)
    assert match.handle.get_matched_indices().tolist() == run(7 * page_size, n).tolist()
    assert match.handle.get_matched_indices().dtype == np.int32
    assert (cache.size_info, cache.node_count) == (SizeInfo(n, 0), 1)


def test_other_tokens_do_not_match_even_when_their_hash_does(make_cache: MakeCache):
    for page_size in (1, 4):
        cache = make_cache(page_size)
        cache.insert_prefix([1, 2, 3, 4], [0, 1, 2, 3])
        assert cache.match_prefix([5, 6, 7, 8]).cached_len == 0


def test_siblings_are_told_apart_by_their_whole_first_page(make_cache: MakeCache):
    cache = make_cache(4)
    prompts = [[1, 2, 3, last] for last in range(20)]
    for page, prompt in enumerate(prompts):
        assert cache.insert_prefix(prompt, run(4 * page, 4)).cached_len == 0
    for page, prompt in enumerate(prompts):
        assert cache.match_prefix(prompt).handle.get_matched_indices().tolist() == run(4 * page, 4).tolist()
    assert cache.node_count == 20


def test_less_than_a_page_leaves_no_trace(make_cache: MakeCache):
    cache = make_cache(4)
    inserted = cache.insert_prefix([1, 2, 3], [0, 1, 2])
    assert (inserted.cached_len, inserted.handle.cached_len) == (0, 0)
    assert cache.match_prefix([1, 2, 3]).cached_len == 0
    assert (cache.size_info, cache.node_count) == (SizeInfo(0, 0), 0)


def test_a_tail_of_less_than_a_page_stays_the_callers(make_cache: MakeCache):
    cache = make_cache(4)
    inserted = cache.insert_prefix(run(1, 7), run(8, 7))
    assert inserted.handle.cached_len == 4
    assert cache.match_prefix(run(1, 7)).cached_len == 4
    assert sorted(cache.held_slots().tolist()) == [8, 9, 10, 11]
    assert cache.size_info == SizeInfo(4, 0)


def test_inserting_again_keeps_the_first_slots_and_reports_the_duplicates(make_cache: MakeCache):
    cache = make_cache(2)
    cache.insert_prefix(run(1, 4), run(0, 4))
    again = cache.insert_prefix(run(1, 8), run(100, 8))
    assert (again.cached_len, again.handle.cached_len) == (4, 8)
    assert again.handle.get_matched_indices().tolist() == [0, 1, 2, 3, 104, 105, 106, 107]
    whole = cache.insert_prefix(run(1, 8), run(200, 8))
    assert (whole.cached_len, whole.handle.cached_len) == (8, 8)
    assert cache.size_info == SizeInfo(8, 0)


def test_the_cache_keeps_copies_of_what_it_is_given(make_cache: MakeCache):
    cache = make_cache(2)
    ids, slots = run(1, 6), run(0, 6)
    handle = cache.insert_prefix(ids, slots).handle
    ids[:], slots[:] = -1, -1
    assert cache.match_prefix(run(1, 6)).cached_len == 6
    assert handle.get_matched_indices().tolist() == run(0, 6).tolist()


def test_the_slots_that_a_handle_gives_are_the_callers_copy(make_cache: MakeCache):
    cache = make_cache(1)
    handle = cache.insert_prefix([1, 2], [5, 6]).handle
    handle.get_matched_indices()[:] = -1
    assert handle.get_matched_indices().tolist() == [5, 6]


@every_page_size
def test_a_match_that_ends_inside_a_node_splits_it_at_a_page_and_changes_no_size(make_cache: MakeCache, page_size: int):
    cache = make_cache(page_size)
    n = 4 * page_size
    whole = cache.insert_prefix(run(1, n), run(0, n)).handle
    asked = np.concatenate([run(1, 3 * page_size - 1), [0]])
    expected = 3 * page_size - 1 if page_size == 1 else 2 * page_size
    match = cache.match_prefix(asked)
    assert match.cached_len == expected
    assert cache.node_count == 2
    assert cache.size_info == SizeInfo(n, 0)
    assert match.handle.get_matched_indices().tolist() == run(0, expected).tolist()
    assert whole.get_matched_indices().tolist() == run(0, n).tolist()
    assert cache.match_prefix(run(1, n)).cached_len == n


def test_a_match_that_ends_in_a_nodes_first_page_splits_nothing(make_cache: MakeCache):
    cache = make_cache(4)
    cache.insert_prefix(run(1, 8), run(0, 8))
    assert cache.match_prefix([1, 2, 3, 0]).cached_len == 0
    assert cache.node_count == 1


def test_handles_stay_valid_however_often_their_path_is_split(make_cache: MakeCache):
    cache = make_cache(1)
    handles = [cache.insert_prefix(run(1, n), run(0, n)).handle for n in (16, 20, 40)]
    for handle in handles:
        cache.lock_handle(handle)
    for n in (1, 39, 8, 18, 30, 2):
        cache.match_prefix(run(1, n))
        cache.insert_prefix([*range(1, n + 1), 1000 + n], [*range(n), 1000 + n])
        cache.check_integrity()
    for handle, n in zip(handles, (16, 20, 40), strict=True):
        assert (handle.cached_len, handle.attached) == (n, True)
        assert handle.get_matched_indices().tolist() == run(0, n).tolist()
        cache.lock_handle(handle, unlock=True)
    assert cache.size_info == SizeInfo(46, 0)


def test_prefixes_of_different_namespaces_never_match_each_other(make_cache: MakeCache):
    cache = make_cache(2)
    names = [b"", b"a", b"b", b"a\x00", np.array([1, 2], np.int32).tobytes()]
    for page, name in enumerate(names):
        assert cache.match_prefix([1, 2], namespace=name).cached_len == 0
        assert cache.insert_prefix([1, 2], run(2 * page, 2), namespace=name).cached_len == 0
    for page, name in enumerate(names):
        found = cache.match_prefix([1, 2, 3, 4], namespace=name).handle
        assert found.get_matched_indices().tolist() == [2 * page, 2 * page + 1]
    assert cache.node_count == len(names)


def test_a_namespace_is_gone_once_it_holds_nothing(make_cache: MakeCache):
    cache = make_cache(1)
    for i in range(5):
        cache.match_prefix([1], namespace=b"asked %d" % i)
        cache.insert_prefix([1], [i], namespace=b"kept %d" % i)
        cache.insert_prefix([], [], namespace=b"empty %d" % i)
    assert cache.namespace_count == 5
    assert sorted(cache.evict(5).tolist()) == [0, 1, 2, 3, 4]
    assert cache.namespace_count == 0


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([1.0, 2.0], TypeError),
        (["a"], TypeError),
        ([True], TypeError),
        (np.zeros(2, np.float32), TypeError),
        ([None], TypeError),
        ([[1, 2]], ValueError),
        (5, ValueError),
        ([2**31], ValueError),
        ([-(2**31) - 1], ValueError),
        (np.array([2**63], np.uint64), ValueError),
    ],
)
def test_ids_that_are_not_int32_in_one_dimension_are_refused(make_cache: MakeCache, ids: object, error: type):
    cache = make_cache(1)
    with pytest.raises(error):
        cache.match_prefix(ids)  # type: ignore[arg-type]
    with pytest.raises(error):
        cache.insert_prefix(ids, np.arange(np.size(ids)))  # type: ignore[arg-type]
    assert cache.size_info == SizeInfo(0, 0)


@pytest.mark.parametrize("convert", [list, tuple, np.int64, np.uint8, lambda ids: np.repeat(ids, 2)[::2]])
def test_ids_of_any_integer_kind_are_taken(make_cache: MakeCache, convert: type):
    cache = make_cache(2)
    cache.insert_prefix(convert(run(1, 4)), convert(run(0, 4)))
    assert cache.match_prefix(convert(run(1, 4))).cached_len == 4


@pytest.mark.parametrize(
    "slots",
    [
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 3, 2, 4, 5, 6, 7],
        [1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 8],
        [0, 0, 0, 0, 4, 4, 4, 4],
        [-4, -3, -2, -1, 0, 1, 2, 3],
    ],
)
def test_slots_that_are_no_whole_pages_are_refused_before_anything_changes(make_cache: MakeCache, slots: list[int]):
    cache = make_cache(4)
    cache.insert_prefix(run(1, 4), run(100, 4))
    before = cache.size_info, cache.node_count, cache.held_slots().tolist()
    with pytest.raises(ValueError, match="slots"):
        cache.insert_prefix(run(1, 8), slots)
    with pytest.raises(ValueError, match="slots"):
        cache.insert_prefix(run(1, 8), slots, namespace=b"new")
    assert (cache.size_info, cache.node_count, cache.held_slots().tolist()) == before
    assert cache.namespace_count == 1


def test_pages_may_lie_anywhere(make_cache: MakeCache):
    cache = make_cache(2)
    handle = cache.insert_prefix(run(1, 6), [8, 9, 0, 1, 4, 5]).handle
    assert handle.get_matched_indices().tolist() == [8, 9, 0, 1, 4, 5]
