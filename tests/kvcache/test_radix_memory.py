"""Memory stays in proportion to what is cached, whatever was cached before."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import POLICIES, RadixCache

EMPTY_BYTES = 150_000
"""One chunk of nodes, the smallest hash table, and what the policy keeps."""


def bytes_of(cache: RadixCache) -> int:
    return cache.stats().metadata_bytes


@pytest.mark.parametrize(("page_size", "policy"), [(1, "lru"), (16, "lru"), (16, "hazard")])
def test_short_prefixes_take_at_most_16_bytes_for_each_token(page_size: int, policy: str):
    cache = RadixCache(page_size, policy=policy)
    prompts = np.random.default_rng(0).integers(0, 128_000, (50_000, 16), dtype=np.int32)
    for page, prompt in enumerate(prompts):
        cache.insert_prefix(prompt, np.arange(16 * page, 16 * page + 16, dtype=np.int32))
    assert bytes_of(cache) <= 16 * cache.size_info.total_size


def test_what_a_split_pins_does_not_keep_the_rest():
    # Of a policy that remembers nothing of what it evicted.
    cache = RadixCache(1, policy="lru")
    n = 1_000_000
    slots = np.arange(n, dtype=np.int32)
    cache.insert_prefix(slots, slots)
    cache.lock_handle(cache.match_prefix([0]).handle)
    for left in (n // 2, n // 4, n // 100, 1):
        cache.evict(cache.size_info.total_size - left)
        assert bytes_of(cache) <= EMPTY_BYTES + 2 * 8 * left
    cache.check_integrity()


def test_a_trimmed_prefix_gives_its_tails_memory_back():
    cache = RadixCache(16, policy="lru")
    slots = np.arange(160_000, dtype=np.int32)
    cache.insert_prefix(slots, slots)
    for _ in range(9_999):
        cache.evict_pages(1)
    cache.check_integrity()
    assert bytes_of(cache) <= EMPTY_BYTES
    assert cache.match_prefix(slots).handle.get_matched_indices().tolist() == list(range(16))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_cache_is_as_small_as_a_new_one(policy: str):
    cache = RadixCache(1, policy=policy)
    new = bytes_of(cache)
    handles = [cache.insert_prefix([i, i], [2 * i, 2 * i + 1], namespace=b"%d" % (i % 7)).handle for i in range(20_000)]
    assert bytes_of(cache) > 20_000 * 64
    cache.reset()
    cache.match_prefix([1])
    assert bytes_of(cache) <= new + 16_384
    assert not any(handle.attached for handle in handles)


def test_old_handles_do_not_come_true_again_after_a_reset():
    cache = RadixCache(1)
    for _ in range(5):
        old = cache.insert_prefix([1], [1]).handle
        cache.reset()
        cache.insert_prefix([1], [2])
        assert not old.attached


def churn(cache: RadixCache, steps: int, pool_pages: int) -> int:
    """Random prompts over a small pool, extended, cut, locked and evicted; returns the most memory seen."""
    rng = np.random.default_rng(7)
    page = cache.page_size
    vocabulary = rng.integers(0, 128_000, (2_000, 8 * page), dtype=np.int32)
    free = list(range(pool_pages))
    row, running = np.zeros(32, np.int32), []
    most = 0
    draws = rng.integers(0, 1 << 30, (steps, 4))
    for step, (a, b, c, d) in enumerate(draws.tolist()):
        ids = np.concatenate([vocabulary[a % 2_000][: page * (1 + b % 8)], vocabulary[c % 50][: page * (1 + d % 8)]])
        handle = cache.admit(ids, row, namespace=b"%d" % (a % 3))
        pages, cached = len(ids) // page, handle.cached_len // page
        missing = pages - cached
        if len(free) < missing:
            if cache.evictable_pages < missing:
                free += cache.unlock_pages(handle).tolist()
                continue
            free += cache.evict_pages(missing).tolist()
        row[cached:pages] = [free.pop() for _ in range(missing)]
        if step % 5:
            free += cache.finish(ids, row, handle, namespace=b"%d" % (a % 3)).tolist()
        else:
            free += cache.commit(ids, row, handle, namespace=b"%d" % (a % 3)).tolist()
            running.append(handle)
        if len(running) > 20:
            free += cache.unlock_pages(running.pop(0)).tolist()
        if step % 50_000 == 49_999:
            free += (cache.reset(b"1")[::page] // page).tolist()
        if step % 1_000 == 0:
            most = max(most, bytes_of(cache))
    for handle in running:
        free += cache.unlock_pages(handle).tolist()
    cache.check_integrity()
    assert sorted([*free, *(cache.held_slots()[::page] // page).tolist()]) == list(range(pool_pages))
    return most


def most_bytes(cache: RadixCache, pool_pages: int) -> int:
    """Tokens and pages twice, a node of its own for each page, and the tables that a policy has from the start."""
    new = bytes_of(RadixCache(cache.page_size, policy=cache.policy))
    return max(EMPTY_BYTES, new) + pool_pages * (2 * 4 * (cache.page_size + 1) + 100)


@pytest.mark.parametrize("policy", POLICIES)
def test_churn_leaves_no_memory_behind(policy: str):
    cache = RadixCache(4, policy=policy)
    assert churn(cache, steps=20_000, pool_pages=3_000) <= most_bytes(cache, 3_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_ten_million_operations_leave_no_memory_behind(policy: str):
    cache = RadixCache(4, policy=policy)
    # Three operations a step: an admission, an insert with its unlock, an eviction.
    assert churn(cache, steps=3_400_000, pool_pages=3_000) <= most_bytes(cache, 3_000)
