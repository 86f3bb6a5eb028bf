"""What a prefix cache promises, whatever keeps it.

A prefix cache maps token ids to the KV slots that hold their keys and values, so that a request computes only what no
earlier request computed. Ids and slots are int32; a slot is ``page * page_size + offset``, and the slots of one page
are always handed over together, in order. The cache owns the slots it was given until ``evict``, ``reset``,
``discard`` or an unlock hands them back; it never touches what they hold.

Everything here is synchronous and single-threaded: the scheduler calls it between two awaits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Int32Array = npt.NDArray[np.int32]


class IntegrityError(AssertionError):
    """An invariant of the cache or of page ownership does not hold: a fault of this code, never of its caller."""


class NotEnoughEvictableError(ValueError):
    """More tokens were asked of ``evict`` than are evictable. Nothing was changed."""


class Handle(ABC):
    """A place in the cache: the end of a matched or inserted prefix.

    A handle stays valid across splits for as long as it is locked. Unlocked, it is only good until the next ``evict``,
    ``reset`` or ``discard``.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def cached_len(self) -> int:
        """Tokens of the prefix, a multiple of the page size."""

    @property
    @abstractmethod
    def attached(self) -> bool:
        """Whether the prefix can still be matched: False once ``reset`` or ``discard`` cut it from the tree."""

    @abstractmethod
    def get_matched_indices(self) -> Int32Array:
        """The prefix's slots, int32[cached_len], in token order; a copy."""


@dataclass(frozen=True, slots=True)
class MatchResult:
    """What ``match_prefix`` found: ``cached_len`` tokens, ending at ``handle``. Nothing is locked yet."""

    cached_len: int
    handle: Handle


@dataclass(frozen=True, slots=True)
class InsertResult:
    """What ``insert_prefix`` did.

    Attributes:
        cached_len: Tokens that were already there. The caller still owns the slots it passed for them: duplicates.
        handle: The end of what the cache now holds of the ids; the slots in [cached_len, handle.cached_len) are now
            the cache's, those from handle.cached_len on are still the caller's.
    """

    cached_len: int
    handle: Handle


@dataclass(frozen=True, slots=True)
class SizeInfo:
    """Tokens held: evictable ones are under no lock, protected ones under at least one."""

    evictable_size: int
    protected_size: int

    @property
    def total_size(self) -> int:
        """Tokens held in all."""
        return self.evictable_size + self.protected_size


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache did since it was made, and what it is now.

    Attributes:
        lookups: Matches and admissions; refused admissions and peeks do not count.
        lookup_tokens: Tokens that those asked for.
        hit_tokens: Tokens that those found.
        inserted_tokens: Tokens taken over.
        evicted_pages: Pages evicted, by the policy's classes, the least valuable first: one for ``lru``, two for
            ``slru``, one for each priority, for ``lfu`` those used by 0, 1, 2-3, 4-7, ... 128-255 matches, and for
            ``hazard`` those used by 1, 2, 3-4, 5-8 and more requests.
        nodes: Nodes that hold tokens and can be matched.
        namespaces: Namespaces that hold any.
        metadata_bytes: Memory of all this, the KV itself not counted.
    """

    lookups: int
    lookup_tokens: int
    hit_tokens: int
    inserted_tokens: int
    evicted_pages: tuple[int, ...]
    nodes: int
    namespaces: int
    metadata_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class HotPrefix:
    """A cached prefix and how often it was matched.

    Attributes:
        namespace: The namespace it is in.
        ids: int32[n], its tokens.
        pages: int32[n / page_size], its pages.
        hits: Matches that went through all of it.
    """

    namespace: bytes
    ids: Int32Array
    pages: Int32Array
    hits: int


class PrefixCache(ABC):
    """The interface of ``RadixCache`` and its control group ``NaiveCache``.

    Args:
        page_size: Tokens in a page, at least 1. Lengths that the cache reports are multiples of it.
    """

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size

    @abstractmethod
    def match_prefix(self, ids: Int32Array | Sequence[int], *, namespace: bytes = b"") -> MatchResult:
        """Finds the longest cached prefix of ``ids`` (int32[n]), aligned down to a page, and marks it as just used.

        Prefixes of different namespaces never match each other.
        """

    @abstractmethod
    def insert_prefix(
        self, ids: Int32Array | Sequence[int], slots: Int32Array | Sequence[int], *, namespace: bytes = b""
    ) -> InsertResult:
        """Takes over the slots of ``ids`` beyond what it already holds, aligned down to a page.

        Copies what it keeps: the caller may overwrite both arrays at once.

        Args:
            ids: int32[n].
            slots: int32[n], one for each id, whole pages in order.
            namespace: As in ``match_prefix``.

        Raises:
            ValueError: The lengths differ, or a page's slots are not ``page * page_size + (0, 1, ...)``.
        """

    @abstractmethod
    def lock_handle(self, handle: Handle, unlock: bool = False) -> Int32Array:
        """Locks the path from ``handle`` to the root against eviction, or takes one lock back. Locks count.

        Returns:
            Slots that nobody holds any more, int32[m]: empty but for an unlock that takes the last lock off a prefix
            which ``reset`` or ``discard`` cut from the tree before.

        Raises:
            IntegrityError: Unlocking what is not locked.
        """

    @abstractmethod
    def evict(self, n: int) -> Int32Array:
        """Forgets ``n`` evictable tokens, rounded up to whole pages, least valuable leaves first, tails first.

        Returns:
            The slots that came free: exactly n rounded up to pages, int32.

        Raises:
            NotEnoughEvictableError: Fewer are evictable; nothing was changed.
        """

    # The same in the shape that serving has: whole calls, in pages and rows of a page table.

    @abstractmethod
    def admit(self, ids: Int32Array, row: Int32Array, *, namespace: bytes = b"", required: int = 0) -> Handle | None:
        """Matches ``ids``, locks what was found, and writes its pages into a page table's row.

        Args:
            ids: int32[n], without the request's last token, so that at least one is computed.
            row: int32[m], m at least the pages found: entries [0, cached_len / page_size) are written.
            namespace: As in ``match_prefix``.
            required: Nothing happens, not even a use, if the pages found and those that would then still be evictable
                are fewer. Locking moves what was found out of the evictable pages; this asks after that.

        Returns:
            The locked handle, or None where ``required`` is not met.
        """

    @abstractmethod
    def commit(self, ids: Int32Array, row: Int32Array, handle: Handle, *, namespace: bytes = b"") -> Int32Array:
        """Inserts what a running request computed beyond ``handle``, and moves the handle and its lock to the new end.

        By page, with ``old`` the handle's end before and ``now`` what the cache had already: entries [old, now) of the
        row are exchanged for the cache's pages, and what stood there is returned; those in [now, the handle's new end)
        become the cache's. A handle that is no longer attached, or ``ids`` that end before it, change nothing.

        Args:
            ids: int32[n], the request's tokens whose KV is computed; they continue the handle's prefix.
            row: int32[m], the request's row of the page table, m at least n / page_size.
            handle: Locked; it moves.
            namespace: The one that the handle was admitted in.

        Returns:
            int32[k]: pages that are nobody's any more.
        """

    @abstractmethod
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
        """``commit`` for a request that ended: the handle moves to the new end, and is unlocked.

        Args:
            ids: As for ``commit``, and so are the next three.
            row: See there.
            handle: See there.
            namespace: See there.
            prompt_len: Tokens of the request's prompt; all of ``ids``, if None. For eviction policies that look at it.
            output_len: Tokens of its output; if None, ``ids`` beyond the prompt, or unknown if that is None too.

        Returns:
            int32[k]: pages that are nobody's any more, those of orphans that only this lock held among them.
        """

    @abstractmethod
    def unlock_pages(self, handle: Handle) -> Int32Array:
        """``lock_handle(handle, unlock=True)`` in pages: int32[m]."""

    @abstractmethod
    def evict_pages(self, n: int) -> Int32Array:
        """``evict`` in pages: forgets ``n`` and returns their numbers, int32[n]."""

    @property
    @abstractmethod
    def evictable_pages(self) -> int:
        """Pages under no lock, now."""

    @property
    @abstractmethod
    def size_info(self) -> SizeInfo:
        """Tokens held, now. A split, lock or match changes only how they divide; insert and evict change the total."""

    @property
    @abstractmethod
    def node_count(self) -> int:
        """Nodes that hold tokens and can be matched, now."""

    @abstractmethod
    def stats(self) -> CacheStats:
        """Counters since the cache was made, and its size now."""

    @abstractmethod
    def top_prefixes(self, n: int) -> list[HotPrefix]:
        """The ``n`` most matched prefixes, the hottest and then the longest first; walks all nodes.

        A prefix whose every match went on to the same extension is left out in favour of that one.
        """

    @abstractmethod
    def reset(self, namespace: bytes | None = None) -> Int32Array:
        """Forgets everything, or all of one namespace.

        Locked prefixes can no longer be matched, and come free with their last unlock.

        Returns:
            The slots that came free at once, int32.
        """

    @abstractmethod
    def discard(self, handle: Handle, keep: int) -> Int32Array:
        """Forgets the prefix that ends at ``handle`` beyond its first ``keep`` tokens, with all that extends it.

        For KV that proved wrong. What is locked can no longer be matched, and comes free with its last unlock.

        Args:
            handle: A locked or just returned handle; one that is no longer attached changes nothing.
            keep: Tokens that stay, aligned up to a page.

        Returns:
            The slots that came free at once, int32.
        """

    @abstractmethod
    def check_integrity(self) -> None:
        """Proves the cache's invariants, walking all of it.

        Raises:
            IntegrityError: One does not hold; the message says which.
        """

    @abstractmethod
    def held_slots(self) -> Int32Array:
        """Every slot the cache owns, int32, in no particular order: for proofs of page ownership."""
