"""What each policy evicts first, by example; that the order is exact is proved against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import POLICIES, RadixCache, SizeInfo


def filled(policy: str, *prompts: int) -> RadixCache:
    """A cache of one-token prompts, each token in the slot of its number."""
    cache = RadixCache(1, policy=policy)
    for prompt in prompts:
        cache.insert_prefix([prompt], [prompt])
    return cache


def order_of(cache: RadixCache) -> list[int]:
    cache.check_integrity()
    return cache.evict(cache.size_info.evictable_size).tolist()


def test_the_default_is_the_first_of_the_policies():
    assert RadixCache(1).policy == POLICIES[0] == "hazard"
    assert set(POLICIES) >= {"lru", "slru", "lfu", "priority"}


def test_an_unknown_policy_is_refused_by_name_with_those_there_are():
    with pytest.raises(ValueError, match=r"'fifo'.*lru, slru, lfu, priority"):
        RadixCache(1, policy="fifo")


@pytest.mark.parametrize("policy", POLICIES)
def test_without_matches_every_policy_evicts_the_oldest_first(policy: str):
    assert order_of(filled(policy, 3, 1, 2)) == [3, 1, 2]


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "hazard"])  # it goes by what it learned
def test_the_last_unlock_counts_as_a_use(policy: str):
    cache = filled(policy, 1, 2, 3)
    handle = cache.insert_prefix([1], [9]).handle
    cache.insert_prefix([2], [9])
    cache.lock_handle(handle)
    cache.lock_handle(handle)
    cache.lock_handle(handle, unlock=True)
    cache.insert_prefix([3], [9])
    cache.lock_handle(handle, unlock=True)
    assert order_of(cache) == [2, 3, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_child_goes_before_its_parent_however_much_it_was_used(policy: str):
    cache = RadixCache(1, policy=policy)
    cache.insert_prefix([1], [1], priority=1)
    cache.insert_prefix([1, 2], [1, 2], priority=6)
    for _ in range(5):
        cache.match_prefix([1, 2], priority=3)
    cache.insert_prefix([9], [9], priority=7)
    assert [slot for slot in order_of(cache) if slot != 9] == [2, 1]


def test_lfu_evicts_what_fewer_matches_used_first():
    cache = filled("lfu", 1, 2, 3)
    for prompt, matches in [(1, 2), (2, 1), (3, 1)]:
        for _ in range(matches):
            cache.match_prefix([prompt])
    cache.insert_prefix([2], [9])
    cache.insert_prefix([4], [4])
    assert order_of(cache) == [4, 3, 2, 1]


def test_lfu_tells_frequencies_apart_up_to_255():
    cache = filled("lfu", 1, 2)
    for prompt, matches in [(1, 600), (2, 300)]:
        for _ in range(matches):
            cache.match_prefix([prompt])
    assert order_of(cache) == [1, 2]


def test_slru_evicts_what_was_matched_after_what_only_came():
    cache = filled("slru", 1, 2)
    cache.match_prefix([1])
    for prompt in (3, 4, 5, 6):
        cache.insert_prefix([prompt], [prompt])
    assert order_of(cache) == [2, 3, 4, 5, 6, 1]


def test_slru_protects_no_more_than_four_fifths_of_what_is_evictable():
    cache = filled("slru", 1, 2, 3, 4, 5)
    for prompt in (1, 2, 3, 4, 5):
        cache.match_prefix([prompt])
    cache.insert_prefix([5], [9])
    # 1 lost its protection, and is now older than what comes after.
    for prompt in (6, 7):
        cache.insert_prefix([prompt], [prompt])
    assert cache.evict(1).tolist() == [1]
    assert cache.stats().evicted_pages == (1, 0)


def test_priority_evicts_the_lower_first_and_the_oldest_among_equals():
    cache = RadixCache(1, policy="priority")
    for prompt, priority in [(1, 7), (2, 0), (3, 3), (4, 0)]:
        cache.insert_prefix([prompt], [prompt], priority=priority)
    assert order_of(cache) == [2, 4, 3, 1]


def test_a_prefix_keeps_the_highest_priority_it_was_used_with():
    cache = RadixCache(1, policy="priority")
    cache.insert_prefix([1], [1], priority=0)
    cache.insert_prefix([2], [2], priority=1)
    cache.match_prefix([1], priority=5)
    cache.match_prefix([1], priority=0)
    assert order_of(cache) == [2, 1]


def test_what_a_request_commits_has_the_priority_that_it_was_admitted_with():
    cache = RadixCache(1, policy="priority")
    cache.insert_prefix([2], [2], priority=3)
    ids = row = np.array([1, 5], np.int32)
    handle = cache.admit(ids[:1], row.copy(), priority=4)
    assert handle is not None
    assert cache.finish(ids, row.copy(), handle).tolist() == []
    assert order_of(cache) == [2, 1, 5]


@pytest.mark.parametrize("priority", [-1, 8, 100])
def test_a_priority_out_of_range_is_refused_before_anything_changes(priority: int):
    cache = filled("priority", 1)
    with pytest.raises(ValueError, match="priority"):
        cache.match_prefix([1], priority=priority)
    with pytest.raises(ValueError, match="priority"):
        cache.insert_prefix([2], [2], priority=priority)
    assert cache.size_info == SizeInfo(1, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_evictions_are_counted_by_the_policys_classes(policy: str):
    cache = RadixCache(1, policy=policy)
    for prompt, matches in [(1, 0), (2, 1), (3, 2), (4, 100)]:
        cache.insert_prefix([prompt], [prompt], priority=min(matches, 7))
        for _ in range(matches):
            cache.match_prefix([prompt])
    cache.evict(4)
    assert (
        cache.stats().evicted_pages
        == {
            "lru": (4,),
            "slru": (1, 3),
            "lfu": (1, 1, 1, 0, 0, 0, 0, 1, 0),
            "priority": (1, 1, 1, 0, 0, 0, 0, 1),
            "hazard": (4, 0, 0, 0, 0),  # a match alone is no request that ended
        }[policy]
    )
