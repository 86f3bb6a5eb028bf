"""Who owns each page, from admission to the last step that may touch it.

Every page is at any moment in exactly one of: *free*, the *tree* (the prefix cache), one *holding* (what a sequence
holds for itself alone), *retiring* (given up, but a launched step may still touch it). ``check_integrity`` proves it.
The scheduler never moves a page itself: it asks for room, says what was computed, and says that a sequence ended.

A sequence's page table is a row of ``table``. Its entries for the cached prefix point at the tree's pages, under the
sequence's lock; the others are its own. Rows and pages leave a sequence only through the retire queue: they are stamped
with the last launched step and come free when that step was collected.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvcache.allocator import PageAllocator
from kvcache.base import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache.base import Handle, Int32Array, PrefixCache


_NOTHING = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Holding:
    """What one admitted sequence holds. Only the ledger changes it.

    Attributes:
        row: Its row of the page table, and of the engine's future-token table.
        handle: The end of its locked prefix in the cache.
        pages: Entries of its row that are in use, locked ones included.
        admitted_len: Tokens that came from the cache at admission.
        namespace: Of its prefixes.
        writes: Whether what it computes may enter the cache: False under bypass, and after a flush.
    """

    row: int
    handle: Handle
    pages: int
    admitted_len: int
    namespace: bytes
    writes: bool


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by owner; they sum to ``total``."""

    total: int
    free: int
    evictable: int
    protected: int
    private: int
    retiring: int


@dataclass(frozen=True, slots=True)
class _Retiring:
    stamp: int
    pages: Int32Array
    row: int | None


class Ledger:
    """Moves pages between the pool, the prefix cache and sequences.

    Args:
        cache: The prefix cache; from here on, only the ledger changes it.
        num_pages: Pages in the pool.
        max_rows: Sequences that may be admitted at once.
        max_tokens: Tokens whose KV one sequence may hold.
    """

    def __init__(self, cache: PrefixCache, num_pages: int, max_rows: int, max_tokens: int) -> None:
        self.cache = cache
        self.page_size = cache.page_size
        self.num_pages = num_pages
        width = min(self.pages_for(max_tokens), num_pages)
        self.table = np.zeros((max_rows, width), dtype=np.int32)
        self._allocator = PageAllocator(num_pages)
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._holdings: dict[int, Holding] = {}
        self._retiring: deque[_Retiring] = deque()
        self._launched = 0
        self._collected = 0

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    # Room for sequences.

    def admit(self, ids: Int32Array, *, namespace: bytes, bypass: bool, spare: int) -> Holding | None:
        """Locks the longest cached prefix of ``ids[:-1]`` and allocates pages for the rest of ``ids``.

        The last id is left out of the match, so that at least one token is always computed.

        Args:
            ids: int32[n], every token whose KV the sequence is about to need, n at least 1.
            namespace: Of its prefixes.
            bypass: Neither match now nor insert later.
            spare: Pages that have to stay allocatable for others.

        Returns:
            The holding, or None, with nothing changed, where there is no room now.
        """
        if not self._free_rows:
            return None
        row = self._free_rows[-1]
        entries = self.table[row]
        needed = self.pages_for(len(ids))
        # What has to come out of the cache, found or evicted: the cache asks for it after locking what it found, since
        # locking moves that from the evictable pages to the protected ones.
        required = needed + spare - self._allocator.free_count
        sought = ids[:0] if bypass else ids[:-1]
        handle = self.cache.admit(sought, entries, namespace=namespace, required=required)
        if handle is None:
            return None
        self._free_rows.pop()
        cached_len = handle.cached_len
        cached = cached_len // self.page_size
        entries[cached:needed] = self._allocate(needed - cached)
        holding = Holding(row, handle, needed, cached_len, namespace, writes=not bypass)
        self._holdings[row] = holding
        return holding

    def extend(self, holding: Holding, tokens: int) -> bool:
        """Makes room for the KV of ``tokens`` tokens in all; returns False, with nothing changed, if there is none."""
        needed = self.pages_for(tokens) - holding.pages
        if needed <= 0:
            return True
        if needed > self.allocatable_pages:
            return False
        self.table[holding.row, holding.pages : holding.pages + needed] = self._allocate(needed)
        holding.pages += needed
        return True

    @property
    def allocatable_pages(self) -> int:
        """Pages that are free or can be evicted now."""
        return self._allocator.free_count + self.cache.evictable_pages

    # What a sequence computed, and its end.

    def commit(self, holding: Holding, ids: Int32Array) -> None:
        """Shares a running sequence's computed prefix: ``ids`` are the tokens whose forward pass completed."""
        self._settle(holding, ids, finished=False)

    def release(self, holding: Holding, ids: Int32Array, prompt_len: int | None = None) -> None:
        """Ends a sequence, keeping the prefix ``ids`` whose forward pass completed in the cache.

        ``prompt_len`` is how much of it was prompt, for a sequence that is over; None for one that comes back.
        """
        self._settle(holding, ids, finished=True, prompt_len=prompt_len)

    def discard(self, holding: Holding) -> None:
        """Ends a sequence whose KV is not to be trusted, and forgets what it had shared before."""
        self._retire(self._pages_of(self.cache.discard(holding.handle, holding.admitted_len)))
        holding.writes = False
        self._settle(holding, _NOTHING, finished=True)

    def _settle(self, holding: Holding, ids: Int32Array, *, finished: bool, prompt_len: int | None = None) -> None:
        """The one place where pages pass from a sequence to the cache or to the retire queue.

        By token position, with every border but ``computed`` at a page border::

            0          old cached      now cached       inserted        computed       allocated
            |   locked    |   duplicates   |   given to     |     tail      |    reserved    |
            |   before    |  tree has own  |   the tree     | (part of page)|  (not written) |

        Duplicates go to the retire queue once the page table points at the tree's pages instead. The given pages are
        the tree's, and stay in the page table under the new lock. Tail and reserved pages stay the sequence's until
        it ends, and then retire too.
        """
        entries, handle = self.table[holding.row], holding.handle
        # What may not write only takes its lock back. A prefix that was cut from the tree the cache itself leaves as it
        # is: its pages already have an owner.
        if not holding.writes:
            back = self.cache.unlock_pages(handle) if finished else _NOTHING
        elif finished:
            back = self.cache.finish(ids, entries, handle, namespace=holding.namespace, prompt_len=prompt_len)
        else:
            back = self.cache.commit(ids, entries, handle, namespace=holding.namespace)
        self._retire(back)
        if finished:
            kept = handle.cached_len // self.page_size
            self._retire(entries[kept : holding.pages].copy(), holding.row)
            del self._holdings[holding.row]

    def flush(self, namespace: bytes | None = None) -> int:
        """Forgets every cached prefix, or those of one namespace; what its running sequences compute is not cached.

        Returns:
            The pages that came free at once.
        """
        for holding in self._holdings.values():
            if namespace is None or holding.namespace == namespace:
                holding.writes = False
        pages = self._pages_of(self.cache.reset(namespace))
        self._retire(pages)
        return len(pages)

    # The retire queue.

    def launch(self, step: int) -> None:
        """Step ``step`` was launched: what retires from now on waits for it."""
        self._launched = step

    def collect(self, step: int) -> None:
        """Step ``step`` was collected: what waited for it comes free."""
        self._collected = step
        while self._retiring and self._retiring[0].stamp <= step:
            self._free(self._retiring.popleft())

    def _retire(self, pages: Int32Array, row: int | None = None) -> None:
        if len(pages) == 0 and row is None:
            return
        entry = _Retiring(self._launched, pages, row)
        if self._launched == self._collected:
            self._free(entry)
        else:
            self._retiring.append(entry)

    def _free(self, entry: _Retiring) -> None:
        self._allocator.free(entry.pages)
        if entry.row is not None:
            self._free_rows.append(entry.row)

    # Pages.

    def _allocate(self, pages: int) -> Int32Array:
        missing = pages - self._allocator.free_count
        if missing > 0:
            # An evicted page need not retire: no live sequence holds it, and whoever gets it writes it in a later step.
            self._allocator.free(self.cache.evict_pages(missing))
        return self._allocator.allocate(pages)

    def _pages_of(self, slots: Int32Array) -> Int32Array:
        return slots[:: self.page_size] // self.page_size

    # Proof.

    @property
    def counts(self) -> PageCounts:
        """Pages by owner, now."""
        size = self.cache.size_info
        return PageCounts(
            total=self.num_pages,
            free=self._allocator.free_count,
            evictable=size.evictable_size // self.page_size,
            protected=size.protected_size // self.page_size,
            private=sum(len(self._private_pages(holding)) for holding in self._holdings.values()),
            retiring=sum(len(entry.pages) for entry in self._retiring),
        )

    def _private_pages(self, holding: Holding) -> Int32Array:
        private: Int32Array = self.table[holding.row, holding.handle.cached_len // self.page_size : holding.pages]
        return private

    def check_integrity(self) -> None:
        """Proves that every page and row has exactly one owner, and the cache's own invariants.

        Raises:
            IntegrityError: The message names the page or row and its owners.
        """
        self.cache.check_integrity()
        self._allocator.check_integrity()
        held = self.cache.held_slots()
        if self.cache.size_info.total_size != len(held):
            raise IntegrityError(f"the cache holds {len(held)} slots but counts {self.cache.size_info.total_size}")
        owners: dict[str, Iterable[Int32Array]] = {
            "free": [self._allocator.free_pages()],
            "tree": [held[held % self.page_size == 0] // self.page_size],
            "holding": [self._private_pages(holding) for holding in self._holdings.values()],
            "retiring": [entry.pages for entry in self._retiring],
        }
        count = np.zeros(self.num_pages, dtype=np.int32)
        for groups in owners.values():
            for pages in groups:
                np.add.at(count, pages, 1)
        for page in np.flatnonzero(count != 1):
            names = [name for name, groups in owners.items() if any(page in pages for pages in groups)]
            raise IntegrityError(f"page {page} has {count[page]} owners: {names}")
        for holding in self._holdings.values():
            cached = self._pages_of(holding.handle.get_matched_indices())
            if not np.array_equal(self.table[holding.row, : len(cached)], cached):
                raise IntegrityError(f"row {holding.row} does not point at its locked prefix")
        rows = sorted([*self._free_rows, *self._holdings, *(e.row for e in self._retiring if e.row is not None)])
        if rows != list(range(len(self.table))):
            raise IntegrityError(f"rows have not one owner each: {rows}")
