"""The control group: a prefix cache that remembers nothing.

It changes no line of its callers, who work as with ``RadixCache`` and only compute everything again. So it refuses the
same arguments, and counts locks as strictly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcache.arguments import as_int32, insertable_arrays, pages_up
from kvcache.base import (
    CacheStats,
    Handle,
    HotPrefix,
    InsertResult,
    IntegrityError,
    MatchResult,
    NotEnoughEvictableError,
    PrefixCache,
    SizeInfo,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache.base import Int32Array


class NaiveHandle(Handle):
    """The empty prefix, which is always there."""

    __slots__ = ("locks",)

    def __init__(self) -> None:
        self.locks = 0

    @property
    def cached_len(self) -> int:
        """0."""
        return 0

    @property
    def attached(self) -> bool:
        """True: nothing is ever cut off."""
        return True

    def get_matched_indices(self) -> Int32Array:
        """int32[0]."""
        return np.empty(0, np.int32)


class NaiveCache(PrefixCache):
    """Never matches and keeps nothing: every slot that is offered stays the caller's.

    Args:
        page_size: Tokens in a page, at least 1.
    """

    def match_prefix(self, ids: Int32Array | Sequence[int], *, namespace: bytes = b"") -> MatchResult:
        """The empty prefix.

        Raises:
            TypeError, ValueError: As ``RadixCache.match_prefix``.
        """
        del namespace
        as_int32(ids, "ids")
        return MatchResult(0, NaiveHandle())

    def insert_prefix(
        self, ids: Int32Array | Sequence[int], slots: Int32Array | Sequence[int], *, namespace: bytes = b""
    ) -> InsertResult:
        """Takes nothing over.

        Raises:
            TypeError, ValueError: As ``RadixCache.insert_prefix``.
        """
        del namespace
        insertable_arrays(ids, slots, self.page_size)
        return InsertResult(0, NaiveHandle())

    def lock_handle(self, handle: Handle, unlock: bool = False) -> Int32Array:
        """Counts locks, which protect nothing; returns int32[0].

        Raises:
            IntegrityError: Unlocking a handle that is not locked.
        """
        if not isinstance(handle, NaiveHandle):
            raise TypeError(f"not a handle of a naive cache: {type(handle).__name__}")
        if unlock and handle.locks == 0:
            raise IntegrityError("a handle that is not locked was unlocked")
        handle.locks += -1 if unlock else 1
        return np.empty(0, np.int32)

    def evict(self, n: int) -> Int32Array:
        """int32[0] for n = 0.

        Raises:
            NotEnoughEvictableError: n is positive.
            ValueError: n is negative.
        """
        if pages_up(n, self.page_size, "n") > 0:
            raise NotEnoughEvictableError(f"{n} tokens to evict, but a naive cache holds none")
        return np.empty(0, np.int32)

    def admit(
        self, ids: Int32Array, row: Int32Array, *, namespace: bytes = b"", required: int = 0
    ) -> NaiveHandle | None:
        """Locks the empty prefix; None if anything is required."""
        del ids, row, namespace
        if required > 0:
            return None
        handle = NaiveHandle()
        handle.locks = 1
        return handle

    def commit(self, ids: Int32Array, row: Int32Array, handle: Handle, *, namespace: bytes = b"") -> Int32Array:
        """Takes nothing over: int32[0]."""
        del ids, row, handle, namespace
        return np.empty(0, np.int32)

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
        """Takes nothing over and unlocks: int32[0].

        Raises:
            IntegrityError: The handle is not locked.
        """
        del ids, row, namespace, prompt_len, output_len
        return self.unlock_pages(handle)

    def unlock_pages(self, handle: Handle) -> Int32Array:
        """``lock_handle(handle, unlock=True)``: int32[0]."""
        return self.lock_handle(handle, unlock=True)

    def evict_pages(self, n: int) -> Int32Array:
        """``evict`` in pages: int32[0] for n = 0."""
        return self.evict(n * self.page_size)

    @property
    def evictable_pages(self) -> int:
        """0."""
        return 0

    @property
    def size_info(self) -> SizeInfo:
        """0 and 0."""
        return SizeInfo(0, 0)

    @property
    def node_count(self) -> int:
        """0."""
        return 0

    def stats(self) -> CacheStats:
        """Zeros: lookups that cannot find anything are not counted."""
        return CacheStats(0, 0, 0, 0, (), 0, 0, 0)

    def top_prefixes(self, n: int) -> list[HotPrefix]:
        """None."""
        del n
        return []

    def reset(self, namespace: bytes | None = None) -> Int32Array:
        """int32[0]."""
        del namespace
        return np.empty(0, np.int32)

    def discard(self, handle: Handle, keep: int) -> Int32Array:
        """int32[0].

        Raises:
            ValueError: keep is negative.
        """
        del handle
        pages_up(keep, self.page_size, "keep")
        return np.empty(0, np.int32)

    def check_integrity(self) -> None:
        """Holds by construction: there is no state."""

    def held_slots(self) -> Int32Array:
        """int32[0]."""
        return np.empty(0, np.int32)
