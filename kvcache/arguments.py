"""The one place where what callers hand to a prefix cache is checked, so that every cache refuses the same things.

All checks are made before a cache changes anything, and convert without copying where the argument already is an int32
array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache.base import Int32Array

_INT32 = np.iinfo(np.int32)


def as_int32(values: Int32Array | Sequence[int], name: str) -> Int32Array:
    """``values`` as a contiguous int32[n]: itself if it is one, else a copy.

    Raises:
        TypeError: They are not integers.
        ValueError: They are not one-dimensional, or do not fit int32.
    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    if array.dtype != np.int32 and (array.min() < _INT32.min or array.max() > _INT32.max):
        raise ValueError(f"{name} must fit int32")
    return np.ascontiguousarray(array, np.int32)


def check_page_slots(slots: Int32Array, page_size: int) -> None:
    """Proves that ``slots`` (int32[n], n a multiple of the page size) are whole pages, each in order.

    Raises:
        ValueError: A page's slots are not ``page * page_size + (0, 1, ...)``.
    """
    pages = slots.reshape(-1, page_size)
    first = pages[:, :1]
    if np.any(first < 0) or np.any(first % page_size) or np.any(pages - first != np.arange(page_size)):
        raise ValueError(f"slots must be whole pages of {page_size} slots, each in order from the page's first slot")


def insertable_arrays(
    ids: Int32Array | Sequence[int], slots: Int32Array | Sequence[int], page_size: int
) -> tuple[Int32Array, Int32Array]:
    """The whole pages of what a caller wants inserted: int32[m] ids and slots, m = n aligned down to a page.

    Raises:
        TypeError: Either is not integers.
        ValueError: Either is not one-dimensional or does not fit int32, the lengths differ, or ``check_page_slots``.
    """
    token_ids, token_slots = as_int32(ids, "ids"), as_int32(slots, "slots")
    if len(token_ids) != len(token_slots):
        raise ValueError(f"{len(token_ids)} ids but {len(token_slots)} slots")
    whole = len(token_ids) // page_size * page_size
    check_page_slots(token_slots[:whole], page_size)
    return token_ids[:whole], token_slots[:whole]


def pages_up(tokens: int, page_size: int, name: str) -> int:
    """``tokens`` aligned up to whole pages, still in tokens.

    Raises:
        ValueError: It is negative.
    """
    if tokens < 0:
        raise ValueError(f"{name} must not be negative, but is {tokens}")
    return -(-tokens // page_size) * page_size
