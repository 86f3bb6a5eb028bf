"""The fast cache against its oracle, operation by operation: lengths, slots, the order of eviction, under every policy.

Two fast caches run beside the oracle, one whose hashes all collide: identity must be the tokens (A9), and nothing that
can be observed may depend on a hash.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvcache import IntegrityError, NotEnoughEvictableError, OutOfPagesError, PageAllocator, RadixCache
from tests.kvcache.hazard_oracle import oracle_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache import Int32Array

POOL_PAGES = 40
ROW = 24

namespaces = st.sampled_from([b"", b"a", b"tenant"])
# Few distinct pages, so that prompts often share prefixes and often part in the middle of a node.
page_choices = st.lists(st.integers(0, 3), max_size=6)
tails = st.integers(0, 63)
priorities = st.integers(0, 7)
choice = st.integers(0, 1000)


@dataclass(eq=False)
class Held:
    """The same handle of each cache, and how often it is locked."""

    handles: list[Any]
    locks: int = 0


@dataclass(eq=False)
class Sequence:
    """A request between admission and end: its tokens, and a row and a locked handle of each cache."""

    ids: Int32Array
    rows: list[Int32Array]
    handles: list[Any]
    namespace: bytes
    pages: int


class FastAgainstOracle(RuleBasedStateMachine):
    def __init__(self, policy: str, page_size: int) -> None:
        super().__init__()
        self.policy = policy
        self.page_size = page_size
        self.caches: list[Any] = [
            oracle_of(policy, page_size),
            RadixCache(page_size, policy=policy, hash_seed=1),
            RadixCache(page_size, policy=policy, constant_hash=True),
        ]
        self.allocator = PageAllocator(POOL_PAGES)
        self.held: list[Held] = []
        self.sequences: list[Sequence] = []
        self.lookups = self.asked = self.found = 0

    # The same call to each.

    def each(self, call: Callable[..., Any], *args: list[Any]) -> list[Any]:
        """``call(cache, args of that cache ...)`` for each cache."""
        return [call(*of_one) for of_one in zip(self.caches, *args, strict=True)]

    def same(self, call: Callable[..., Any], *args: list[Any], ordered: bool = True) -> Any:
        """What all caches return: it must be the same."""
        results = [
            result if not isinstance(result, np.ndarray) else (result if ordered else np.sort(result)).tolist()
            for result in self.each(call, *args)
        ]
        assert results[1] == results[0]
        assert results[2] == results[0]
        return results[0]

    def ids(self, choices: list[int], tail: int) -> Int32Array:
        """Whole pages, some of which differ in their last token only, and a tail that begins like page 0."""
        whole: list[int] = []
        for choice in choices:
            whole += [choice // 2] * (self.page_size - 1) + [choice]
        return np.array([*whole, *([0] * (tail % self.page_size))], np.int32)

    def slots_of(self, pages: Int32Array) -> Int32Array:
        return (pages[:, None] * self.page_size + np.arange(self.page_size, dtype=np.int32)).reshape(-1)

    def pages_for(self, ids: Int32Array) -> int:
        return -(-len(ids) // self.page_size)

    def take_back(self, slots: list[int]) -> None:
        pages = np.array(slots[:: self.page_size], np.int32) // self.page_size
        assert slots == self.slots_of(pages).tolist()
        self.allocator.free(pages)

    def keep(self, handles: list[Any]) -> None:
        self.held.append(Held(handles))

    def drop_unlocked_handles(self) -> None:
        """After evict, reset and discard only locked handles are still good."""
        self.held = [held for held in self.held if held.locks]

    def count_lookup(self, ids: Int32Array, found: int) -> None:
        self.lookups += 1
        self.asked += len(ids)
        self.found += found

    # The interface.

    @initialize(choices=page_choices)
    def start_with_a_prompt(self, choices: list[int]) -> None:
        self.insert(choices, 0, b"", 0)

    @rule(choices=page_choices, tail=tails, namespace=namespaces, priority=priorities)
    def match(self, choices: list[int], tail: int, namespace: bytes, priority: int) -> None:
        ids = self.ids(choices, tail)
        foreseen = self.same(lambda cache: cache.peek_prefix(ids, namespace=namespace))
        matches = self.each(lambda cache: cache.match_prefix(ids, namespace=namespace, priority=priority))
        assert [match.cached_len for match in matches] == [foreseen] * 3
        self.count_lookup(ids, foreseen)
        self.keep([match.handle for match in matches])

    @rule(choices=page_choices, tail=tails, namespace=namespaces, priority=priorities)
    def insert(self, choices: list[int], tail: int, namespace: bytes, priority: int) -> None:
        ids = self.ids(choices, tail)
        try:
            pages = self.allocator.allocate(self.pages_for(ids))
        except OutOfPagesError:
            return
        slots = self.slots_of(pages)[: len(ids)]
        inserted = self.each(
            lambda cache: cache.insert_prefix(ids.copy(), slots.copy(), namespace=namespace, priority=priority)
        )
        lengths = {(result.cached_len, result.handle.cached_len) for result in inserted}
        ((already, end),) = lengths
        assert end == len(choices) * self.page_size
        self.keep([result.handle for result in inserted])
        self.allocator.free(np.concatenate([pages[: already // self.page_size], pages[len(choices) :]]))

    @precondition(lambda self: self.held)
    @rule(which=choice)
    def lock(self, which: int) -> None:
        held = self.held[which % len(self.held)]
        held.locks += 1
        assert self.same(lambda cache, handle: cache.lock_handle(handle), held.handles) == []

    @precondition(lambda self: self.held)
    @rule(which=choice)
    def unlock(self, which: int) -> None:
        held = self.held[which % len(self.held)]
        if held.handles[0].node.locks == 0:
            for cache, handle in zip(self.caches, held.handles, strict=True):
                with pytest.raises(IntegrityError):
                    cache.lock_handle(handle, unlock=True)
            return
        if held.locks == 0:
            return
        held.locks -= 1
        self.take_back(self.same(lambda cache, handle: cache.lock_handle(handle, unlock=True), held.handles))
        if held.locks == 0 and not held.handles[0].attached:
            self.held.remove(held)

    @rule(n=st.integers(0, 8 * 64))
    def evict(self, n: int) -> None:
        if n > self.caches[0].size_info.evictable_size:
            for cache in self.caches:
                with pytest.raises(NotEnoughEvictableError):
                    cache.evict(n)
            return
        freed = self.same(lambda cache: cache.evict(n))
        assert len(freed) == -(-n // self.page_size) * self.page_size
        self.take_back(freed)
        self.drop_unlocked_handles()

    @rule(namespace=st.none() | namespaces)
    def reset(self, namespace: bytes | None) -> None:
        self.take_back(self.same(lambda cache: cache.reset(namespace), ordered=False))
        self.drop_unlocked_handles()

    @precondition(lambda self: self.held)
    @rule(which=choice, keep=st.integers(0, 4 * 64))
    def discard(self, which: int, keep: int) -> None:
        handles = self.held[which % len(self.held)].handles
        self.take_back(self.same(lambda cache, handle: cache.discard(handle, keep), handles, ordered=False))
        self.drop_unlocked_handles()

    # The fused calls.

    @rule(choices=page_choices, tail=tails, namespace=namespaces, priority=priorities, required=st.integers(0, 8))
    def admit(self, choices: list[int], tail: int, namespace: bytes, priority: int, required: int) -> None:
        ids = self.ids(choices, tail)
        rows = [np.full(ROW, -1, np.int32) for _ in self.caches]
        handles = self.each(
            lambda cache, row: cache.admit(ids, row, namespace=namespace, priority=priority, required=required), rows
        )
        assert len({handle is None for handle in handles}) == 1
        if handles[0] is None:
            return
        self.count_lookup(ids, handles[0].cached_len)
        sequence = Sequence(ids, rows, handles, namespace, handles[0].cached_len // self.page_size)
        self.sequences.append(sequence)
        self.make_room(sequence)

    @precondition(lambda self: self.sequences)
    @rule(which=choice, choices=page_choices, tail=tails)
    def grow(self, which: int, choices: list[int], tail: int) -> None:
        sequence = self.sequences[which % len(self.sequences)]
        more = np.concatenate([sequence.ids, self.ids(choices, tail)])
        if self.pages_for(more) <= ROW:
            sequence.ids = more
            self.make_room(sequence)

    def make_room(self, sequence: Sequence) -> None:
        """Pages for all its tokens; what finds none is forgotten, but its cached prefix."""
        missing = self.pages_for(sequence.ids) - sequence.pages
        if missing > self.allocator.free_count:
            sequence.ids = sequence.ids[: sequence.pages * self.page_size]
            return
        pages = self.allocator.allocate(missing)
        for row in sequence.rows:
            row[sequence.pages : sequence.pages + missing] = pages
        sequence.pages += missing

    @precondition(lambda self: self.sequences)
    @rule(which=choice, computed=st.integers(0, ROW * 64))
    def commit(self, which: int, computed: int) -> None:
        self.settle("commit", self.sequences[which % len(self.sequences)], computed)

    @precondition(lambda self: self.sequences)
    @rule(which=choice, computed=st.integers(0, ROW * 64))
    def finish(self, which: int, computed: int) -> None:
        self.end(self.sequences[which % len(self.sequences)], computed)

    def end(self, sequence: Sequence, computed: int) -> None:
        self.sequences.remove(sequence)
        self.settle("finish", sequence, computed)
        self.allocator.free(sequence.rows[0][sequence.handles[0].cached_len // self.page_size : sequence.pages])
        self.drop_unlocked_handles()

    def settle(self, call: str, sequence: Sequence, computed: int) -> None:
        ids = sequence.ids[: max(computed % (len(sequence.ids) + 1), sequence.handles[0].cached_len)]
        freed = self.same(
            lambda cache, row, handle: getattr(cache, call)(ids, row, handle, namespace=sequence.namespace),
            sequence.rows,
            sequence.handles,
        )
        self.allocator.free(freed)

    def teardown(self) -> None:
        """Whatever happened, ending and evicting everything brings every page back exactly once."""
        for sequence in list(self.sequences):
            self.end(sequence, len(sequence.ids))
        for held in self.held:
            for _ in range(held.locks):
                self.take_back(self.same(lambda cache, handle: cache.lock_handle(handle, unlock=True), held.handles))
        self.take_back(self.same(lambda cache: cache.evict(cache.size_info.total_size)))
        assert self.allocator.free_count == POOL_PAGES
        for cache in self.caches:
            assert (cache.size_info.total_size, cache.node_count, cache.namespace_count) == (0, 0, 0)
            cache.check_integrity()

    # What must hold after every step.

    @invariant()
    def every_cache_proves_its_own_integrity(self) -> None:
        for cache in self.caches:
            cache.check_integrity()

    @invariant()
    def all_hold_the_same(self) -> None:
        self.same(lambda cache: (cache.size_info, cache.node_count, cache.namespace_count))
        held = np.array(self.same(lambda cache: cache.held_slots(), ordered=False), np.int32)
        private = [row[start:end] for row, start, end in self.private_pages()]
        pages = np.concatenate([held[:: self.page_size] // self.page_size, self.allocator.free_pages(), *private])
        assert sorted(pages.tolist()) == list(range(POOL_PAGES))

    def private_pages(self) -> list[tuple[Int32Array, int, int]]:
        return [(s.rows[0], s.handles[0].cached_len // self.page_size, s.pages) for s in self.sequences]

    @invariant()
    def all_handles_and_rows_are_the_same(self) -> None:
        for handles in [held.handles for held in self.held] + [sequence.handles for sequence in self.sequences]:
            self.same(
                lambda _, handle: (handle.attached, handle.cached_len, handle.get_matched_indices().tolist()), handles
            )
        for sequence in self.sequences:
            self.same(lambda _, row: row, sequence.rows)
            prefix = sequence.rows[0][: sequence.handles[0].cached_len // self.page_size]
            assert self.slots_of(prefix).tolist() == sequence.handles[0].get_matched_indices().tolist()

    @invariant()
    def what_was_done_is_counted(self) -> None:
        by_class: Counter[int] = Counter()
        for segment, pages in self.caches[0].evicted_by_segment.items():
            by_class[segment.bit_length() if self.policy == "lfu" else segment] += pages
        for cache in self.caches[1:]:
            stats = cache.stats()
            assert (stats.lookups, stats.lookup_tokens, stats.hit_tokens) == (self.lookups, self.asked, self.found)
            assert {n: pages for n, pages in enumerate(stats.evicted_pages) if pages} == by_class
