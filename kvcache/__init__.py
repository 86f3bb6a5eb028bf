"""The prefix cache, the page allocator and the KV pools: pure, synchronous, without asyncio.

``PrefixCache`` is the interface; ``RadixCache`` is the cache, ``NaiveCache`` its control group. ``PageAllocator`` says
which pages are free. Importing this package does not import torch; ``kvcache.pool``, which holds the keys and values
themselves, does.
"""

from kvcache._core import fast_compare_key
from kvcache.allocator import OutOfPagesError, PageAllocator
from kvcache.base import (
    CacheStats,
    Handle,
    HotPrefix,
    InsertResult,
    Int32Array,
    IntegrityError,
    MatchResult,
    NotEnoughEvictableError,
    PrefixCache,
    SizeInfo,
)
from kvcache.naive import NaiveCache
from kvcache.radix import POLICIES, RadixCache

__all__ = [
    "POLICIES",
    "CacheStats",
    "Handle",
    "HotPrefix",
    "InsertResult",
    "Int32Array",
    "IntegrityError",
    "MatchResult",
    "NaiveCache",
    "NotEnoughEvictableError",
    "OutOfPagesError",
    "PageAllocator",
    "PrefixCache",
    "RadixCache",
    "SizeInfo",
    "fast_compare_key",
]
