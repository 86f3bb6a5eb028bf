"""Attention on the CPU by ``engine._kernels``: keys and values are read in place, in blocks that stay in cache.

Promises, beyond those of ``AttentionBackend``:

- A row's bits depend on its query, its position, and the keys and values up to that position, for a given path. They do
  not depend on the rest of the batch, on how a prompt was cut into chunks, on page numbers or page size, or on threads.
- NaN or infinity reaches only the rows that see it, not earlier rows of the same sequence.
- What lies beyond a sequence's last token in its last page, and page-table entries beyond that page, are not read.

Tensors go to C++ as addresses, because passing them as objects costs more than the attention of a small batch. So what
an address cannot tell is checked here, and the layout's values are checked there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine import _kernels
from engine.attention.checks import check_layout_arrays, check_tensors

if TYPE_CHECKING:
    from engine.attention.base import PagedLayout


class NativeAttention:
    """An ``AttentionBackend`` that computes in C++ without the GIL, on threads of its own.

    Threads sleep between calls, and end with the object. Calls from several Python threads take turns.

    Args:
        threads: How many compute, the calling thread included.
        path: The instruction set, one of ``_kernels.attention_paths()``; None takes the fastest.

    Raises:
        ValueError: This CPU has no such path, or threads is less than 1.
    """

    def __init__(self, threads: int, path: str | None = None) -> None:
        self._kernel = _kernels.PagedAttention(threads, path or "")

    @property
    def path(self) -> str:
        """The instruction set in use, such as "avx512"."""
        return self._kernel.path

    @property
    def threads(self) -> int:
        """How many threads compute, the caller included."""
        return self._kernel.threads

    def attend(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        layout: PagedLayout,
        scale: float,
    ) -> None:
        """See ``AttentionBackend.attend``. ``out`` may be ``query`` itself, but overlap nothing else."""
        check_tensors(out, query, key_pool, value_pool, cpu_only=True)
        check_layout_arrays(layout)
        tokens, query_heads, head_dim = query.shape
        num_pages, page_size, kv_heads, _ = key_pool.shape
        self._kernel.attend(
            out.data_ptr(),
            query.data_ptr(),
            key_pool.data_ptr(),
            value_pool.data_ptr(),
            layout.query_starts,
            layout.context_lens,
            layout.pages,
            tokens,
            query_heads,
            kv_heads,
            head_dim,
            num_pages,
            page_size,
            scale,
            query.dtype == torch.bfloat16,
        )
