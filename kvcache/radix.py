"""The prefix cache in a radix tree: common prefixes are stored once, at the granularity of a page.

The tree is C++ (``csrc/radix_tree.h``): nodes are integers, a child is found by its first page of tokens in one hash
table, splits copy nothing, and what eviction takes next is the head of a list. Each method here is one crossing.

Promises, beyond those of ``PrefixCache``:

- **Identity is the tokens.** A hash only says where to look.
- **Sizes.** A node is protected while a lock is on it or on anything that extends it. A lock therefore moves whole
  nodes between evictable and protected, and nothing else does but the first and last of them; a split changes no size,
  and the total changes only when slots come in or go out.
- **Uses.** A match, an insert, and an unlock that takes the last lock off something are uses of their path: its
  unlocked nodes become the last used, each after what extends it. A match that ends inside a node splits it first and
  uses only the part that matched.
- **Order of eviction.** Only leaves under no lock go; the last one taken loses only its tail, and what stays keeps its
  place. Under ``hazard``, the default, what is expected to be used least for the time that keeping it takes goes
  first, as learned from what was used before (docs/cache.md). Under ``lru`` the least recently used goes first;
  ``lfu`` prefers what fewer matches used (up to 255 are told apart), ``slru`` what no match used since it came (what
  one did is protected, up to four fifths of what is evictable), ``priority`` what has the lower priority, each with
  least recently used among equals. The order is exact, and costs the same however many nodes there are.
- **Orphans.** What ``reset`` or ``discard`` cuts while it is locked can no longer be matched or evicted. It still
  counts as protected, keeps every node above it locked, and its slots are what the unlock returns that frees it.
- **Memory.** Beside the KV itself: the tokens and pages of what is cached, at most twice that after splits and
  evictions, and 75 to 90 bytes for each node. It comes back when what it described goes, but for the nodes' own 64
  bytes, which wait for the next node.

The fused calls (``admit``, ``commit``, ``finish``) speak of pages and rows of a page table, not of slots.

Shapes: ids and slots are int32[n]. int32 arrays are used as they lie in memory; other integers are converted. Not
thread-safe.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np

from kvcache._core import RadixHandle, RadixTree, policies
from kvcache.base import (
    CacheStats,
    Handle,
    HotPrefix,
    InsertResult,
    Int32Array,
    MatchResult,
    PrefixCache,
    SizeInfo,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

Handle.register(RadixHandle)


class RadixCache(PrefixCache):
    """A radix tree of whole pages.

    Args:
        page_size: Tokens in a page, at least 1.
        policy: What is evicted first, one of ``kvcache.POLICIES``.
        hash_seed: Makes hash collisions unpredictable; random by default. Nothing that can be observed depends on it.
        constant_hash: All hashes collide, for tests.

    Raises:
        ValueError: There is no such policy, or the page size is not in [1, 2**20].
    """

    def __init__(
        self, page_size: int, *, policy: str = "hazard", hash_seed: int | None = None, constant_hash: bool = False
    ) -> None:
        super().__init__(page_size)
        self.policy = policy
        seed = secrets.randbits(64) if hash_seed is None else hash_seed
        self._tree = RadixTree(page_size, policy, seed, constant_hash)

    def match_prefix(
        self, ids: Int32Array | Sequence[int], *, namespace: bytes = b"", priority: int = 0
    ) -> MatchResult:
        """Finds the longest cached prefix of ``ids`` (int32[n]), aligned down to a page, and marks it as just used.

        A namespace that holds nothing, or nothing of ``ids``, gives the empty prefix. ``priority``, 0 to 7, is that of
        the request; the prefix keeps the highest it was ever used with.

        Raises:
            TypeError, ValueError: ``ids`` are not one-dimensional integers that fit int32, or no such priority.
        """
        handle = self._tree.match(ids, namespace, priority)
        return MatchResult(handle.cached_len, handle)

    def peek_prefix(self, ids: Int32Array | Sequence[int], *, namespace: bytes = b"") -> int:
        """The length in tokens that ``match_prefix`` would find. Changes nothing and is no use."""
        return self._tree.peek(ids, namespace)

    def insert_prefix(
        self,
        ids: Int32Array | Sequence[int],
        slots: Int32Array | Sequence[int],
        *,
        namespace: bytes = b"",
        priority: int = 0,
    ) -> InsertResult:
        """Takes over the slots of ``ids`` beyond what it already holds, aligned down to a page; copies what it keeps.

        Raises:
            TypeError: Either is not integers; nothing was changed.
            ValueError: Either is not one-dimensional or does not fit int32, the lengths differ, or the slots are not
                whole pages; nothing was changed.
        """
        cached_len, handle = self._tree.insert(ids, slots, namespace, priority)
        return InsertResult(cached_len, handle)

    def lock_handle(self, handle: Handle, unlock: bool = False) -> Int32Array:
        """Locks the path from ``handle`` to the root against eviction, or takes one lock back. Locks count.

        A locked prefix can be locked again after it was cut from the tree; an unlocked one cannot.

        Returns:
            int32[m]: the slots of orphans whose last lock this was; else empty.

        Raises:
            IntegrityError: Unlocking a handle that is not locked, or locking one that the cache no longer holds.
            ValueError: The handle is another cache's.
        """
        if unlock:
            return self._tree.unlock(handle)
        self._tree.lock(handle)
        return np.empty(0, np.int32)

    def evict(self, n: int) -> Int32Array:
        """Forgets ``n`` evictable tokens, rounded up to whole pages, in the order that this module's head gives.

        Returns:
            int32[m], m = n rounded up: leaf by leaf in the order they went, the slots of each in token order.

        Raises:
            NotEnoughEvictableError: Fewer are evictable; nothing was changed.
            ValueError: n is negative.
        """
        return self._tree.evict(n)

    def evict_pages(self, n: int) -> Int32Array:
        """``evict`` in pages: forgets ``n`` and returns their numbers, int32[n]."""
        return self._tree.evict_pages(n)

    @property
    def size_info(self) -> SizeInfo:
        """Tokens held, now; orphans are protected ones."""
        return SizeInfo(self._tree.evictable_pages * self.page_size, self._tree.protected_pages * self.page_size)

    @property
    def evictable_pages(self) -> int:
        """Pages under no lock, now."""
        return self._tree.evictable_pages

    @property
    def node_count(self) -> int:
        """Nodes that hold tokens and can be matched, now."""
        return self._tree.node_count

    @property
    def namespace_count(self) -> int:
        """Namespaces that hold any, or that a lock keeps, now."""
        return self._tree.namespace_count

    def reset(self, namespace: bytes | None = None) -> Int32Array:
        """Forgets everything, or all of one namespace.

        Forgetting everything detaches every handle given out so far, those to the empty prefix too; forgetting a
        namespace leaves those attached.

        Returns:
            The slots that came free at once, int32: those under no lock.
        """
        return self._tree.reset(namespace)

    def discard(self, handle: Handle, keep: int) -> Int32Array:
        """Forgets the prefix that ends at ``handle`` beyond its first ``keep`` tokens, with all that extends it.

        ``keep`` is aligned up to a page, and a node that it falls into is split there. Prefixes that leave the path at
        or before that point stay, as does all of it when nothing lies beyond.

        Returns:
            The slots that came free at once, int32: those under no lock.

        Raises:
            ValueError: keep is negative, or the handle is another cache's.
        """
        return self._tree.discard(handle, keep)

    # The calls of the serving path, in pages.

    def admit(
        self, ids: Int32Array, row: Int32Array, *, namespace: bytes = b"", priority: int = 0, required: int = 0
    ) -> RadixHandle | None:
        """See ``PrefixCache``.

        ``priority`` is as in ``match_prefix``; what ``commit`` and ``finish`` insert below the handle gets it too.

        Raises:
            TypeError: The row is not a writable contiguous int32[m].
            ValueError: It is too short; nothing was changed.
        """
        return self._tree.admit(ids, row, namespace, priority, required)

    def commit(self, ids: Int32Array, row: Int32Array, handle: Handle, *, namespace: bytes = b"") -> Int32Array:
        """See ``PrefixCache``.

        Raises:
            IntegrityError: The handle is not locked; nothing was changed.
            TypeError, ValueError: As ``admit``, or ids do not continue the handle's prefix; nothing was changed.
        """
        return self._tree.commit(ids, row, handle, namespace)

    def finish(
        self,
        ids: Int32Array,
        row: Int32Array,
        handle: Handle,
        *,
        namespace: bytes = b"",
        prompt_len: int | None = None,
        output_len: int | None = None,
    ) -> Int32Array:
        """See ``PrefixCache``; raises as ``commit`` does. Of the policies, ``hazard`` looks at the lengths."""
        return self._tree.finish(ids, row, handle, namespace, prompt_len, output_len)

    def unlock_pages(self, handle: Handle) -> Int32Array:
        """``lock_handle(handle, unlock=True)`` in pages, int32[m]."""
        return self._tree.unlock_pages(handle)

    # The same for many requests at once: all is checked before anything changes, then done in the order given.

    def peek_prefixes(self, ids: Sequence[Int32Array], namespaces: Sequence[bytes]) -> Int32Array:
        """``peek_prefix`` of each: int32[len(ids)]."""
        return self._tree.peek_many(ids, namespaces)

    def admit_all(
        self, ids: Sequence[Int32Array], rows: Sequence[Int32Array], namespaces: Sequence[bytes]
    ) -> list[RadixHandle]:
        """``admit`` of each, with priority 0 and nothing required; a row must have room for all pages of its ids."""
        return self._tree.admit_many(ids, rows, namespaces)

    def commit_all(
        self,
        ids: Sequence[Int32Array],
        rows: Sequence[Int32Array],
        handles: Sequence[Handle],
        namespaces: Sequence[bytes],
        finished: Sequence[bool],
    ) -> Int32Array:
        """``finish`` of those that are finished, ``commit`` of the others; returns all their pages as one array."""
        return self._tree.commit_many(ids, rows, handles, namespaces, finished)

    # What there is.

    def stats(self) -> CacheStats:
        """Counters since the cache was made, and its size now."""
        return CacheStats(*self._tree.stats())

    def top_prefixes(self, n: int) -> list[HotPrefix]:
        """The ``n`` most matched prefixes, the hottest and then the longest first; walks all nodes.

        A prefix whose every match went on to the same extension is left out in favour of that one.
        """
        return [HotPrefix(*prefix) for prefix in self._tree.top_prefixes(n)]

    def check_integrity(self) -> None:
        """Proves the invariants of the tree, its memory and its order of eviction, walking all of it.

        Raises:
            IntegrityError: One does not hold; the message says which.
        """
        self._tree.check()

    def held_slots(self) -> Int32Array:
        """Every slot the cache owns, int32, orphans' too, in no particular order."""
        return self._tree.held_slots()


POLICIES: tuple[str, ...] = policies()
