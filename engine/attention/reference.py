"""Attention as the definition says, one sequence after another: the yardstick for tests and the fallback.

It gathers each sequence's pages into one tensor and computes in float32, so its time and memory are those of a plain
softmax over a copied context. Where ``engine._kernels`` is not built it serves, slowly; ``open_attention`` says so.
It runs on any device that torch does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.attention.checks import check_layout_arrays, check_layout_values, check_tensors

if TYPE_CHECKING:
    from engine.attention.base import PagedLayout


class ReferenceAttention:
    """An ``AttentionBackend`` in a few lines of torch."""

    def attend(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        layout: PagedLayout,
        scale: float,
    ) -> None:
        """See ``AttentionBackend.attend``."""
        check_tensors(out, query, key_pool, value_pool)
        check_layout_arrays(layout)
        num_pages, page_size, kv_heads, _ = key_pool.shape
        check_layout_values(layout, len(query), num_pages, page_size)
        group = query.shape[1] // kv_heads
        starts = layout.query_starts.tolist()
        for sequence, context in enumerate(layout.context_lens.tolist()):
            begin, end = starts[sequence], starts[sequence + 1]
            if begin == end:
                continue
            length = context + end - begin
            used = -(-length // page_size)
            pages = torch.from_numpy(layout.pages[sequence, :used]).to(key_pool.device)
            keys = _gather(key_pool, pages, length, group)
            values = _gather(value_pool, pages, length, group)
            scores = scale * torch.einsum("qhd,khd->hqk", query[begin:end].float(), keys)
            positions = torch.arange(length, device=scores.device)
            unseen = positions[None, :] > positions[context:, None]
            weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


def _gather(pool: torch.Tensor, pages: torch.Tensor, length: int, group: int) -> torch.Tensor:
    """Returns one sequence's keys or values, [length, query_heads, head_dim], float32."""
    return pool[pages].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
