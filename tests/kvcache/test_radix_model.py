"""The radix cache against a model too simple to be wrong: a dict from each cached prefix to its last page.

The model knows no nodes. A page is a leaf if no cached prefix extends it by a page; it is locked if a lock was taken on
a handle whose pages include it; its age is the last tick at which it was matched or inserted, or lost its last lock.
Evicting n pages forgets, n times, the oldest unlocked leaf page. That is all the cache promises, so the cache must
agree with it exactly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcache import NotEnoughEvictableError, OutOfPagesError, PageAllocator, SizeInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache import Handle, Int32Array, PrefixCache

POOL_PAGES = 40
Prefix = tuple[bytes, tuple[int, ...]]

namespaces = st.sampled_from([b"", b"a", b"tenant"])
# Few distinct pages, so that prompts often share prefixes and often part in the middle of a node.
page_choices = st.lists(st.integers(0, 3), max_size=6)
tails = st.integers(0, 15)


@dataclass(eq=False)
class Held:
    """A handle, the pages of its prefix, how often it is locked, and whether its prefix can still be matched."""

    handle: Handle
    key: Prefix
    pages: list[int]
    locks: int = 0
    attached: bool = True


class CacheAgainstModel(RuleBasedStateMachine):
    def __init__(self, cache: PrefixCache) -> None:
        super().__init__()
        self.page_size = cache.page_size
        self.cache = cache
        self.allocator = PageAllocator(POOL_PAGES)
        self.cached: dict[Prefix, int] = {}
        self.age: dict[int, int] = {}
        self.orphans: set[int] = set()
        self.locks: Counter[int] = Counter()
        self.handles: list[Held] = []
        self.tick = 0

    # How the model works out what the cache must do.

    def ids(self, choices: list[int], tail: int) -> tuple[int, ...]:
        """Whole pages, some of which differ in their last token only, and a tail that begins like page 0."""
        whole: list[int] = []
        for choice in choices:
            whole += [choice // 2] * (self.page_size - 1) + [choice]
        return (*whole, *([0] * (tail % self.page_size)))

    def pages_matched(self, namespace: bytes, ids: tuple[int, ...]) -> list[int]:
        pages: list[int] = []
        for end in range(self.page_size, len(ids) + 1, self.page_size):
            if (namespace, ids[:end]) not in self.cached:
                break
            pages.append(self.cached[namespace, ids[:end]])
        return pages

    def leaf_pages(self) -> list[tuple[int, Prefix]]:
        """Unlocked pages that nothing extends, with their ages."""
        extended = {(namespace, ids[: -self.page_size]) for namespace, ids in self.cached}
        return [
            (self.age[page], key) for key, page in self.cached.items() if key not in extended and self.locks[page] == 0
        ]

    def evictable(self) -> int:
        return sum(self.locks[page] == 0 for page in self.cached.values())

    def forget(self, keys: list[Prefix]) -> list[int]:
        """Takes prefixes out of the model; returns the pages that come free at once."""
        pages = [self.cached.pop(key) for key in keys]
        self.orphans |= {page for page in pages if self.locks[page]}
        gone = set(keys)
        for held in self.handles:
            held.attached &= held.key not in gone
        return [page for page in pages if self.locks[page] == 0]

    def drop_unlocked_handles(self) -> None:
        """After evict, reset and discard only locked handles are still good."""
        self.handles = [held for held in self.handles if held.locks]

    def take_back(self, slots: Int32Array, expected: list[int]) -> None:
        """Slots that the cache returned: exactly the expected pages, whole. The allocator refuses a page it has."""
        pages = slots[:: self.page_size] // self.page_size
        assert slots.tolist() == self.slots_of(pages).tolist()
        assert sorted(pages.tolist()) == sorted(expected)
        self.allocator.free(pages)

    def slots_of(self, pages: Int32Array | list[int]) -> Int32Array:
        first = np.asarray(pages, np.int32)[:, None] * self.page_size
        return (first + np.arange(self.page_size, dtype=np.int32)).reshape(-1)

    def handle_to(self, handle: Handle, namespace: bytes, ids: tuple[int, ...], pages: list[int]) -> None:
        assert handle.cached_len == len(pages) * self.page_size
        assert handle.get_matched_indices().tolist() == self.slots_of(pages).tolist()
        self.handles.append(Held(handle, (namespace, ids[: len(pages) * self.page_size]), pages))

    # What is done to both.

    @initialize(choices=page_choices)
    def start_with_a_prompt(self, choices: list[int]) -> None:
        self.insert(choices, 0, b"")

    @rule(choices=page_choices, tail=tails, namespace=namespaces)
    def match(self, choices: list[int], tail: int, namespace: bytes) -> None:
        ids = self.ids(choices, tail)
        self.tick += 1
        pages = self.pages_matched(namespace, ids)
        self.age.update(dict.fromkeys(pages, self.tick))
        match = self.cache.match_prefix(ids, namespace=namespace)
        assert match.cached_len == len(pages) * self.page_size
        self.handle_to(match.handle, namespace, ids, pages)

    @rule(choices=page_choices, tail=tails, namespace=namespaces)
    def insert(self, choices: list[int], tail: int, namespace: bytes) -> None:
        ids = self.ids(choices, tail)
        try:
            given = self.allocator.allocate(-(-len(ids) // self.page_size))
        except OutOfPagesError:
            return
        self.tick += 1
        cached = self.pages_matched(namespace, ids)
        pages = cached + given[len(cached) : len(choices)].tolist()
        for n, page in enumerate(pages, start=1):
            self.cached[namespace, ids[: n * self.page_size]] = page
            self.age[page] = self.tick
        ids_array, slots = np.array(ids, np.int32), self.slots_of(given)[: len(ids)].copy()
        inserted = self.cache.insert_prefix(ids_array, slots, namespace=namespace)
        ids_array[:], slots[:] = -1, -1
        assert inserted.cached_len == len(cached) * self.page_size
        self.handle_to(inserted.handle, namespace, ids, pages)
        self.allocator.free(np.concatenate([given[: len(cached)], given[len(choices) :]]))

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.handles))
        held.locks += 1
        self.locks.update(held.pages)
        assert self.cache.lock_handle(held.handle).tolist() == []

    @precondition(lambda self: any(held.locks for held in self.handles))
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([held for held in self.handles if held.locks]))
        held.locks -= 1
        self.locks.subtract(held.pages)
        self.tick += 1
        self.age.update({page: self.tick for page in held.pages if self.locks[page] == 0})
        freed = [page for page in held.pages if page in self.orphans and self.locks[page] == 0]
        self.orphans -= set(freed)
        self.take_back(self.cache.lock_handle(held.handle, unlock=True), freed)
        if not held.attached and held.locks == 0:
            self.handles.remove(held)

    @rule(n=st.integers(0, 6 * 16))
    def evict(self, n: int) -> None:
        pages = -(-n // self.page_size)
        if pages > self.evictable():
            with pytest.raises(NotEnoughEvictableError):
                self.cache.evict(n)
            return
        freed = []
        for _ in range(pages):
            _, oldest = min(self.leaf_pages())
            freed += self.forget([oldest])
        self.take_back(self.cache.evict(n), freed)
        self.drop_unlocked_handles()

    @rule()
    def reset(self) -> None:
        freed = self.forget(list(self.cached))
        for held in self.handles:
            held.attached = False
        self.take_back(self.cache.reset(), freed)
        self.drop_unlocked_handles()

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), keep=st.integers(0, 4 * 16))
    def discard(self, data: st.DataObject, keep: int) -> None:
        held = data.draw(st.sampled_from(self.handles))
        namespace, ids = held.key
        kept_pages = -(-keep // self.page_size)
        first_wrong = ids[: (kept_pages + 1) * self.page_size]
        wrong = []
        if held.attached and kept_pages < len(held.pages):
            wrong = [key for key in self.cached if key[0] == namespace and key[1][: len(first_wrong)] == first_wrong]
        freed = self.forget(wrong)
        self.take_back(self.cache.discard(held.handle, keep), freed)
        self.drop_unlocked_handles()

    def teardown(self) -> None:
        """Whatever happened, unlocking and evicting everything brings every page back exactly once."""
        for held in list(self.handles):
            for _ in range(held.locks):
                freed = self.cache.lock_handle(held.handle, unlock=True)
                self.allocator.free(freed[:: self.page_size] // self.page_size)
        left = self.cache.evict(self.cache.size_info.total_size)
        self.allocator.free(left[:: self.page_size] // self.page_size)
        assert self.cache.size_info == SizeInfo(0, 0)
        assert self.cache.node_count == 0
        assert self.allocator.free_count == POOL_PAGES
        self.cache.check_integrity()
        self.allocator.check_integrity()

    # What must hold after every step.

    @invariant()
    def the_cache_proves_its_own_integrity(self) -> None:
        self.cache.check_integrity()
        self.allocator.check_integrity()

    @invariant()
    def every_page_is_free_or_in_the_cache(self) -> None:
        pages = np.unique(self.cache.held_slots() // self.page_size)
        assert set(pages.tolist()) == set(self.cached.values()) | self.orphans
        assert sorted([*pages.tolist(), *self.allocator.free_pages().tolist()]) == list(range(POOL_PAGES))

    @invariant()
    def sizes_agree(self) -> None:
        evictable = self.evictable()
        protected = len(self.cached) - evictable + len(self.orphans)
        assert self.cache.size_info == SizeInfo(evictable * self.page_size, protected * self.page_size)

    @invariant()
    def handles_stay_what_they_were(self) -> None:
        for held in self.handles:
            assert held.handle.attached == held.attached
            assert held.handle.cached_len == len(held.pages) * self.page_size
            assert held.handle.get_matched_indices().tolist() == self.slots_of(held.pages).tolist()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_cache_agrees_with_the_model_after_every_step(make_cache: Callable[[int], PrefixCache], page_size: int):
    run_state_machine_as_test(
        lambda: CacheAgainstModel(make_cache(page_size)),
        settings=settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True),
    )
