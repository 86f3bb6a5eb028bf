"""The ``hazard`` policy: equal to its oracle where runs of 512 tokens come and go, bounded, repeatable."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvcache import RadixCache
from tests.kvcache.comparison import FastAgainstOracle, Sequence
from tests.kvcache.test_radix_oracle import random_step

OUTPUTS = [None, 0, 63, 64, 127, 128, 1000]


class HazardAgainstOracle(FastAgainstOracle):
    """Pages of half a run and of a whole one, so that a few pages make ghosts; requests end with known lengths."""

    def __init__(self, page_size: int) -> None:
        super().__init__("hazard", page_size)

    def settle(self, call: str, sequence: Sequence, computed: int) -> None:
        if call == "commit":
            super().settle(call, sequence, computed)
            return
        ids = sequence.ids[: max(computed % (len(sequence.ids) + 1), sequence.handles[0].cached_len)]
        lengths = {
            "prompt_len": [None, len(ids), len(ids) // 2, len(ids) + 99][computed % 4],
            "output_len": OUTPUTS[computed % 7],
        }
        freed = self.same(
            lambda cache, row, handle: cache.finish(ids, row, handle, namespace=sequence.namespace, **lengths),
            sequence.rows,
            sequence.handles,
        )
        self.allocator.free(freed)


@pytest.mark.parametrize("page_size", [256, 512, 1024])
def test_it_agrees_with_its_oracle_after_every_step(page_size: int):
    run_state_machine_as_test(
        lambda: HazardAgainstOracle(page_size),
        settings=settings(max_examples=25, stateful_step_count=40, deadline=None, derandomize=True),
    )


@pytest.mark.parametrize("page_size", [128, 256, 512])
def test_it_agrees_with_its_oracle_throughout_a_long_run_that_evicts_and_comes_back(page_size: int):
    rng = np.random.default_rng(page_size)
    run = HazardAgainstOracle(page_size)
    for _ in range(6000):
        random_step(run, rng)
        run.all_hold_the_same()
    run.every_cache_proves_its_own_integrity()
    assert len(run.caches[0].ghosts) > 0
    assert run.caches[0].hazards.now > 1000
    run.teardown()


class Traffic:
    """Conversations that come back, documents that many ask about, and much that is asked once, in a pool of pages."""

    def __init__(self, policy: str, *, seed: int, page_size: int = 16, pool_tokens: int = 1 << 16) -> None:
        self.cache = RadixCache(page_size, policy=policy)
        self.rng = np.random.default_rng(seed)
        self.page_size = page_size
        self.free = list(range(pool_tokens // page_size))
        self.row = np.zeros(1 << 14, np.int32)
        self.documents = [self.tokens(4096) for _ in range(12)]
        self.evicted: list[int] = []
        self.asked = self.found = 0

    def tokens(self, n: int) -> np.ndarray:
        return self.rng.integers(0, 1 << 30, n, dtype=np.int32)

    def prompt(self) -> tuple[np.ndarray, int]:
        """Asked once, of many lengths, with long outputs; or a question about a document, with a short one."""
        if self.rng.random() < 0.6:
            return self.tokens(int(self.rng.integers(512, 8192))), 400
        return np.concatenate([self.documents[self.rng.integers(12)], self.tokens(64)]), 20

    def serve(self) -> None:
        ids, output_len = self.prompt()
        handle = self.cache.admit(ids[:-1], self.row)
        assert handle is not None
        self.asked, self.found = self.asked + len(ids), self.found + handle.cached_len
        first, last = handle.cached_len // self.page_size, len(ids) // self.page_size
        if (missing := last - first - len(self.free)) > 0:
            pages = self.cache.evict_pages(missing).tolist()
            self.evicted += pages
            self.free += pages
        self.row[first:last] = [self.free.pop() for _ in range(last - first)]
        self.free += self.cache.finish(ids, self.row, handle, output_len=output_len).tolist()


def test_the_same_traffic_is_evicted_alike_whatever_the_hash_seed():
    first, second = Traffic("hazard", seed=1), Traffic("hazard", seed=1)
    for _ in range(600):
        first.serve()
        second.serve()
    assert first.evicted == second.evicted
    assert len(first.evicted) > 10_000


def test_what_comes_back_outlives_what_does_not():
    hazard, lru = Traffic("hazard", seed=2), Traffic("lru", seed=2)
    for _ in range(1500):
        hazard.serve()
        lru.serve()
    hazard.cache.check_integrity()
    assert hazard.found / hazard.asked > lru.found / lru.asked + 0.05


def test_its_memory_is_bounded_by_the_most_it_ever_held():
    traffic = Traffic("hazard", seed=3, pool_tokens=1 << 15)
    for _ in range(300):
        traffic.serve()
    early = traffic.cache.stats().metadata_bytes
    for _ in range(6000):
        traffic.serve()
    traffic.cache.check_integrity()
    assert traffic.cache.stats().metadata_bytes < early + (1 << 15) // 16 * 64


def test_an_unlock_that_is_not_the_last_ends_no_request():
    cache = RadixCache(1, policy="hazard")
    often = cache.insert_prefix([1], [1]).handle
    cache.insert_prefix([2], [2])
    for _ in range(2):
        cache.lock_handle(often)
    cache.lock_handle(often, unlock=True)
    assert cache.evictable_pages == 1
    cache.lock_handle(often, unlock=True)
    cache.check_integrity()
    assert cache.evict(2).tolist() == [2, 1]


def test_lengths_must_not_be_negative():
    cache = RadixCache(1, policy="hazard")
    row = np.arange(4, dtype=np.int32)
    handle = cache.admit(row[:1], row.copy())
    assert handle is not None
    for lengths in ({"prompt_len": -1}, {"output_len": -1}):
        with pytest.raises(ValueError, match="must not be negative"):
            cache.finish(row, row.copy(), handle, **lengths)
