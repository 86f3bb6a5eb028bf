"""The checks that every attention backend makes before it touches memory, at a cost of a few microseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from engine.attention.base import PagedLayout

MAX_HEAD_DIM = 256
"""Head dimensions are multiples of 8 up to this."""


def check_tensors(
    out: torch.Tensor,
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    *,
    cpu_only: bool = False,
) -> None:
    """Checks types, shapes and strides as ``AttentionBackend.attend`` documents them.

    Args:
        out: [T, query_heads, head_dim].
        query: As out.
        key_pool: [pages, page_size, kv_heads, head_dim].
        value_pool: As key_pool.
        cpu_only: Accept tensors in the CPU's memory only.

    Raises:
        TypeError: A dtype or device is not supported, or not the query's.
        ValueError: A shape or stride is wrong.
    """
    dtype = query.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"query must be float32 or bfloat16, got {dtype}")
    if not out.dtype == key_pool.dtype == value_pool.dtype == dtype:
        raise TypeError(
            f"dtypes differ: out {out.dtype}, query {dtype}, key_pool {key_pool.dtype}, value_pool {value_pool.dtype}"
        )
    if cpu_only and not (query.is_cpu and out.is_cpu and key_pool.is_cpu and value_pool.is_cpu):
        raise TypeError("out, query, key_pool and value_pool must be in the CPU's memory")
    shape, pool_shape = query.shape, key_pool.shape
    if len(shape) != 3 or out.shape != shape:
        raise ValueError(f"query and out must be [T, heads, dim], got {tuple(shape)} and {tuple(out.shape)}")
    if len(pool_shape) != 4 or value_pool.shape != pool_shape:
        raise ValueError(
            f"pools must be [pages, page_size, heads, dim], got {tuple(pool_shape)} and {tuple(value_pool.shape)}"
        )
    _, query_heads, head_dim = shape
    _, page_size, kv_heads, kv_dim = pool_shape
    if kv_dim != head_dim or head_dim % 8 != 0 or not 8 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim must be one multiple of 8 up to {MAX_HEAD_DIM} in query and pools, got {head_dim} and {kv_dim}"
        )
    if kv_heads < 1 or query_heads < 1 or query_heads % kv_heads != 0:
        raise ValueError(f"query heads ({query_heads}) must be a multiple of KV heads ({kv_heads})")
    if page_size < 1:
        raise ValueError("page_size must be at least 1")
    if not (out.is_contiguous() and query.is_contiguous() and key_pool.is_contiguous() and value_pool.is_contiguous()):
        raise ValueError("out, query, key_pool and value_pool must be contiguous")


def check_layout_arrays(layout: PagedLayout) -> None:
    """Checks types, shapes and strides of a layout's arrays, not what is in them.

    Raises:
        TypeError: An array is not int32.
        ValueError: A shape or stride is wrong.
    """
    starts, contexts, pages = layout.query_starts, layout.context_lens, layout.pages
    if not starts.dtype == contexts.dtype == pages.dtype == np.int32:
        raise TypeError(
            "query_starts, context_lens and pages must be int32, "
            f"got {starts.dtype}, {contexts.dtype} and {pages.dtype}"
        )
    if contexts.ndim != 1 or pages.ndim != 2 or starts.shape != (len(contexts) + 1,) or len(pages) != len(contexts):
        raise ValueError(
            "query_starts must be [B + 1], context_lens [B] and pages [B, P], "
            f"got {starts.shape}, {contexts.shape} and {pages.shape}"
        )
    if not (starts.flags.c_contiguous and contexts.flags.c_contiguous and pages.flags.c_contiguous):
        raise ValueError("layout arrays must be C-contiguous")


def check_layout_values(layout: PagedLayout, tokens: int, num_pages: int, page_size: int) -> None:
    """Checks that a layout reads only inside the pools. The native kernel does the same in C++.

    Args:
        layout: One that ``check_layout_arrays`` accepts.
        tokens: Rows of the query.
        num_pages: Pages in each pool.
        page_size: Tokens in a page.

    Raises:
        ValueError: Lengths do not add up, or a page that is to be read is not in [0, num_pages).
    """
    starts = layout.query_starts
    if starts[0] != 0 or starts[-1] != tokens:
        raise ValueError("query_starts must begin with 0 and end with the number of query rows")
    for sequence, (queries, context) in enumerate(zip(np.diff(starts), layout.context_lens, strict=True)):
        if queries < 0:
            raise ValueError(f"query_starts must ascend; sequence {sequence} does not")
        if context < 0:
            raise ValueError(f"context_lens must not be negative; sequence {sequence} is")
        used = -(-(int(context) + int(queries)) // page_size) if queries else 0
        if used > layout.pages.shape[1]:
            raise ValueError(f"sequence {sequence} needs {used} pages; its page table has {layout.pages.shape[1]}")
        read = layout.pages[sequence, :used]
        if used and (read.min() < 0 or read.max() >= num_pages):
            raise ValueError(f"sequence {sequence} has a page outside [0, {num_pages})")
