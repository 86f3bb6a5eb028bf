"""What an attention backend does: causal attention of new tokens over pages, in place, for a ragged batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Where B sequences' T new tokens and their KV are.

    Attributes:
        query_starts: int32[B + 1]; sequence b's new tokens are rows [query_starts[b], query_starts[b + 1]) of the
            query.
        context_lens: int32[B]; tokens of each sequence before its new ones. New token i of sequence b is at position
            context_lens[b] + i, and sees positions up to its own.
        pages: int32[B, P], C-contiguous; position p of sequence b is in slot p % page_size of page
            pages[b, p // page_size].
    """

    query_starts: Int32Array
    context_lens: Int32Array
    pages: Int32Array


class AttentionBackend(Protocol):
    """Reads keys and values from the pool in place. The new tokens' KV is in the pool before the call."""

    def attend(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        layout: PagedLayout,
        scale: float,
    ) -> None:
        """Writes softmax(scale * q k^T) v, causal, grouped-query, accumulated in float32.

        Args:
            out: [T, query_heads, head_dim], same dtype as query, contiguous; every element is written.
            query: [T, query_heads, head_dim], float32 or bfloat16, contiguous.
            key_pool: [pages, page_size, kv_heads, head_dim], same dtype, contiguous. Query head h reads KV head
                h // (query_heads // kv_heads).
            value_pool: As key_pool.
            layout: Where everything is.
            scale: Factor on the scores, usually head_dim ** -0.5.

        Raises:
            TypeError, ValueError: A dtype, shape or stride is not as above; nothing was written.
        """
        ...
