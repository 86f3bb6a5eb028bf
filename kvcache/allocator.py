"""Which pages of the pool are free: a stack of page numbers, and a bitmap that catches a page freed twice.

The allocator knows nothing of who owns a page that is not free; it promises only that it hands out each page once until
that page comes back, and that a page which comes back twice is noticed at once and not when two requests have
overwritten each other. The last page freed is the first one given out, since its memory is the likeliest to be warm.

Every call costs time in proportion to the pages it moves, in vectorised steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvcache.arguments import as_int32
from kvcache.base import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache.base import Int32Array


class OutOfPagesError(Exception):
    """More pages were asked for than are free. Nothing was changed.

    Attributes:
        requested: Pages asked for.
        free: Pages free.
    """

    def __init__(self, requested: int, free: int) -> None:
        super().__init__(f"{requested} pages to allocate, but only {free} are free")
        self.requested = requested
        self.free = free


class PageAllocator:
    """Hands out the pages 0 to ``num_pages`` - 1.

    Args:
        num_pages: Pages in the pool, at least 1.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, not {num_pages}")
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._free_count = num_pages
        self._is_free = np.ones(num_pages, np.bool_)
        self._position = np.empty(num_pages, np.int32)

    @property
    def free_count(self) -> int:
        """Pages free, now."""
        return self._free_count

    def allocate(self, n: int) -> Int32Array:
        """Takes ``n`` pages: int32[n], the last one freed first.

        Raises:
            OutOfPagesError: Fewer are free; nothing was changed.
            ValueError: n is negative.
        """
        if n < 0:
            raise ValueError(f"n must not be negative, but is {n}")
        if n > self._free_count:
            raise OutOfPagesError(n, self._free_count)
        left = self._free_count - n
        pages = self._stack[left : self._free_count][::-1].copy()
        self._is_free[pages] = False
        self._free_count = left
        return pages

    def free(self, pages: Int32Array | Sequence[int]) -> None:
        """Gives ``pages`` (int32[n]) back.

        Raises:
            IntegrityError: One is not a page of this pool, is free already, or is given twice; nothing was changed.
        """
        returned = self._in_range(pages)
        if self._is_free[returned].any():
            raise IntegrityError(f"pages freed that were free already: {returned[self._is_free[returned]].tolist()}")
        # Each page remembers where it was last listed: only a page listed once is listed where it remembers.
        order = np.arange(len(returned), dtype=np.int32)
        self._position[returned] = order
        twice = self._position[returned] != order
        if twice.any():
            raise IntegrityError(f"pages freed twice in one call: {returned[twice].tolist()}")
        self._stack[self._free_count : self._free_count + len(returned)] = returned
        self._free_count += len(returned)
        self._is_free[returned] = True

    def is_free(self, pages: Int32Array | Sequence[int]) -> npt.NDArray[np.bool_]:
        """For each of ``pages`` (int32[n]) whether it is free: bool[n].

        Raises:
            IntegrityError: One is not a page of this pool.
        """
        return self._is_free[self._in_range(pages)]

    def free_pages(self) -> Int32Array:
        """The pages that are free, int32[free_count], in no particular order; a copy."""
        return self._stack[: self._free_count].copy()

    def check_integrity(self) -> None:
        """Proves that the stack and the bitmap say the same.

        Raises:
            IntegrityError: They do not, or the stack lists a page twice or one outside the pool.
        """
        if not 0 <= self._free_count <= self.num_pages:
            raise IntegrityError(f"{self._free_count} of {self.num_pages} pages are free")
        listed = np.sort(self._in_range(self.free_pages()))
        if not np.array_equal(listed, np.flatnonzero(self._is_free)):
            raise IntegrityError("the stack of free pages and the bitmap disagree")

    def _in_range(self, pages: Int32Array | Sequence[int]) -> Int32Array:
        array = as_int32(pages, "pages")
        outside = (array < 0) | (array >= self.num_pages)
        if outside.any():
            raise IntegrityError(f"not pages of a pool of {self.num_pages}: {array[outside].tolist()}")
        return array
