"""A stub of a page pool for benchmarks that drive the prefix cache without an engine: no more than a stack."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Pool:
    """Pages that nobody holds: a stub of a pool, no more than a stack."""

    pages: int
    free: int = 0
    stack: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.free = self.pages
        self.stack = np.arange(self.pages, dtype=np.int32)

    def take(self, count: int) -> np.ndarray:
        """Pages, int32[count]; a view, good until the next ``give``."""
        self.free -= count
        return self.stack[self.free : self.free + count]

    def give(self, pages: np.ndarray) -> None:
        """Takes pages back."""
        self.stack[self.free : self.free + len(pages)] = pages
        self.free += len(pages)
