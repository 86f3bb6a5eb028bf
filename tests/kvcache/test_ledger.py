"""Who owns each page: one property for each region of a sequence's pages, for running and for finished sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import NaiveCache, RadixCache
from kvcache.ledger import Holding, Ledger

PAGE_SIZES = (1, 4, 16)
finished_or_not = pytest.mark.parametrize("finished", [False, True], ids=["unfinished", "finished"])


@dataclass
class Scene:
    """A sequence about to commit or finish, while a launched step still runs.

    Everything before ``old`` came from the cache at admission; somebody else cached up to ``now`` since.
    """

    ledger: Ledger
    holding: Holding
    ids: np.ndarray
    old: int
    now: int
    computed: int
    before: list[int]

    @property
    def inserted(self) -> int:
        return max(self.now, self.computed // self.ledger.page_size * self.ledger.page_size)

    def settle(self, finished: bool) -> None:
        (self.ledger.release if finished else self.ledger.commit)(self.holding, self.ids[: self.computed])
        self.ledger.check_integrity()

    def pages(self, start: int, end: int) -> list[int]:
        """Page table entries of token positions [start, end), rounded up to pages."""
        table, page = self.ledger.table[self.holding.row], self.ledger.page_size
        return table[-(-start // page) : -(-end // page)].tolist()

    def tree_pages(self) -> set[int]:
        held = self.ledger.cache.held_slots()
        return set((held // self.ledger.page_size).tolist())

    def retiring(self) -> set[int]:
        return {int(page) for entry in self.ledger._retiring for page in entry.pages}

    def collect(self) -> None:
        self.ledger.collect(1)
        self.ledger.check_integrity()


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    page = draw(st.sampled_from(PAGE_SIZES))
    old, duplicated, beyond = (draw(st.integers(0, 4)) * page for _ in range(3))
    ids = np.array(draw(st.lists(st.integers(0, 3), min_size=13 * page, max_size=13 * page)), dtype=np.int32)
    now = old + duplicated
    computed = draw(st.integers(now, now + beyond))
    length = draw(st.integers(computed + 1, computed + 3 * page))
    ledger = Ledger(RadixCache(page), num_pages=64, max_rows=4, max_tokens=len(ids))

    def cache_prefix(end: int) -> None:
        other = ledger.admit(ids[: end + 1], namespace=b"", bypass=False, spare=0)
        assert other is not None
        ledger.release(other, ids[:end])

    if old:
        cache_prefix(old)
    holding = ledger.admit(ids[:length], namespace=b"", bypass=False, spare=0)
    assert holding is not None
    assert holding.admitted_len == old
    if now > old:
        cache_prefix(now)
    ledger.launch(1)
    scene = Scene(ledger, holding, ids, old, now, computed, ledger.table[holding.row].tolist())
    ledger.check_integrity()
    return scene


@finished_or_not
@given(scene=scenes())
def test_the_locked_region_stays_the_trees_and_is_protected_until_the_sequence_ends(
    scene: Scene, finished: bool
) -> None:
    locked = scene.pages(0, scene.old)
    scene.settle(finished)
    assert scene.pages(0, scene.old) == locked
    assert set(locked) <= scene.tree_pages()
    size = scene.ledger.cache.size_info
    assert size.protected_size == (0 if finished else scene.inserted)
    scene.collect()


@finished_or_not
@given(scene=scenes())
def test_duplicates_retire_and_the_page_table_points_at_the_trees_pages(scene: Scene, finished: bool) -> None:
    duplicates = scene.pages(scene.old, scene.now)
    scene.settle(finished)
    assert set(duplicates) <= scene.retiring()
    if not finished:
        assert set(scene.pages(scene.old, scene.now)) <= scene.tree_pages() - set(duplicates)
    scene.collect()
    assert scene.retiring() == set()


@finished_or_not
@given(scene=scenes())
def test_the_given_region_becomes_the_trees_under_the_same_pages(scene: Scene, finished: bool) -> None:
    given_pages = scene.pages(scene.now, scene.inserted)
    assert not set(given_pages) & scene.tree_pages()
    scene.settle(finished)
    assert scene.pages(scene.now, scene.inserted) == given_pages
    assert set(given_pages) <= scene.tree_pages()
    found = scene.ledger.cache.match_prefix(scene.ids[: scene.computed])
    assert found.cached_len == scene.computed // scene.ledger.page_size * scene.ledger.page_size
    scene.collect()


@finished_or_not
@given(scene=scenes())
def test_the_tail_stays_private_until_the_end_and_then_retires(scene: Scene, finished: bool) -> None:
    page = scene.ledger.page_size
    tail = scene.before[scene.inserted // page : scene.ledger.pages_for(scene.computed)]
    scene.settle(finished)
    assert not set(tail) & scene.tree_pages()
    assert (set(tail) <= scene.retiring()) if finished else (set(tail) & scene.retiring() == set())
    scene.collect()


@finished_or_not
@given(scene=scenes())
def test_the_reserved_region_stays_allocated_until_the_end_and_then_retires(scene: Scene, finished: bool) -> None:
    start = scene.ledger.pages_for(scene.computed)
    reserved = scene.before[start : scene.holding.pages]
    scene.settle(finished)
    assert not set(reserved) & scene.tree_pages()
    if finished:
        assert set(reserved) <= scene.retiring()
        scene.collect()
        assert scene.ledger.counts.free + scene.ledger.counts.evictable == scene.ledger.num_pages
    else:
        assert scene.before[start : scene.holding.pages] == reserved
        assert not set(reserved) & scene.retiring()


def test_room_is_checked_again_after_locking_took_the_prefix_out_of_the_evictable_pages() -> None:
    ledger = Ledger(RadixCache(1), num_pages=8, max_rows=2, max_tokens=16)
    first = ledger.admit(np.arange(8, dtype=np.int32), namespace=b"", bypass=False, spare=0)
    assert first is not None
    ledger.release(first, np.arange(8, dtype=np.int32))
    # Six cached tokens match and four more need pages; eight are evictable, but six of them are about to be locked.
    ids = np.concatenate([np.arange(6), [90, 91, 92, 93]]).astype(np.int32)
    assert ledger.admit(ids, namespace=b"", bypass=False, spare=0) is None
    assert ledger.counts.protected == 0
    ledger.check_integrity()


def test_a_sequence_that_began_before_a_flush_caches_nothing_after_it() -> None:
    ledger = Ledger(RadixCache(4), num_pages=16, max_rows=2, max_tokens=64)
    ids = np.arange(12, dtype=np.int32)
    holding = ledger.admit(ids, namespace=b"", bypass=False, spare=0)
    assert holding is not None
    ledger.commit(holding, ids[:8])
    assert ledger.flush() == 0
    assert ledger.counts.protected == 2
    ledger.release(holding, ids)
    ledger.check_integrity()
    assert ledger.counts.free == 16


def test_discard_forgets_what_the_sequence_had_shared_and_keeps_what_it_found() -> None:
    ledger = Ledger(RadixCache(4), num_pages=16, max_rows=2, max_tokens=64)
    ids = np.arange(16, dtype=np.int32)
    healthy = ledger.admit(ids[:5], namespace=b"", bypass=False, spare=0)
    assert healthy is not None
    ledger.release(healthy, ids[:4])
    poisoned = ledger.admit(ids, namespace=b"", bypass=False, spare=0)
    assert poisoned is not None
    ledger.commit(poisoned, ids[:12])
    ledger.discard(poisoned)
    ledger.check_integrity()
    assert ledger.cache.match_prefix(ids).cached_len == 4
    assert ledger.counts.free == 15


def test_pages_and_rows_wait_for_the_last_launched_step() -> None:
    ledger = Ledger(RadixCache(1), num_pages=4, max_rows=1, max_tokens=8)
    ids = np.arange(4, dtype=np.int32)
    holding = ledger.admit(ids, namespace=b"", bypass=False, spare=0)
    assert holding is not None
    ledger.launch(1)
    ledger.launch(2)
    ledger.release(holding, ids[:1])
    ledger.collect(1)
    assert ledger.counts.retiring == 3
    assert ledger.admit(ids[:1], namespace=b"", bypass=False, spare=0) is None
    ledger.collect(2)
    assert ledger.counts.retiring == 0
    assert ledger.admit(ids[:1], namespace=b"", bypass=False, spare=0) is not None
    ledger.check_integrity()


def test_under_the_naive_cache_every_page_comes_back_free() -> None:
    ledger = Ledger(NaiveCache(4), num_pages=8, max_rows=2, max_tokens=32)
    ids = np.arange(10, dtype=np.int32)
    holding = ledger.admit(ids, namespace=b"", bypass=False, spare=0)
    assert holding is not None
    ledger.commit(holding, ids[:8])
    assert ledger.extend(holding, 13)
    ledger.release(holding, ids)
    ledger.check_integrity()
    assert ledger.counts.free == 8


def test_extending_beyond_the_pool_changes_nothing() -> None:
    ledger = Ledger(RadixCache(4), num_pages=3, max_rows=1, max_tokens=64)
    holding = ledger.admit(np.arange(9, dtype=np.int32), namespace=b"", bypass=False, spare=0)
    assert holding is not None
    assert not ledger.extend(holding, 13)
    assert holding.pages == 3
    ledger.check_integrity()
