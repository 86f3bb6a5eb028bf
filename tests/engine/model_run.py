"""Runs a model over a KV pool step by step, as an engine does, and keeps the scores of every position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.attention import PagedLayout, open_attention
from kvcache.pool import KVPool

if TYPE_CHECKING:
    from engine.models.base import Model


@dataclass
class Sequence:
    """A sequence under way: its ids, its page table, and how many of its tokens have their KV in the pool."""

    ids: list[int]
    pages: list[int]
    done: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.ids) - self.done

    def all_logits(self) -> torch.Tensor:
        return torch.cat(self.logits)


class ModelRun:
    """One model and one pool."""

    def __init__(self, model: Model, *, page_size: int, tokens: int = 2048, threads: int = 2) -> None:
        shape = model.shape
        self.model = model
        self.page_size = page_size
        self.pool = KVPool(
            layers=shape.layers,
            num_pages=-(-tokens // page_size),
            page_size=page_size,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=model.dtype,
        )
        self._attention = open_attention(threads)
        # Neighbouring pages of a sequence lie apart and in no order, as they do after a while of serving.
        self._free = np.random.default_rng(0).permutation(self.pool.num_pages).tolist()

    def begin(self, ids: list[int], *, cached: Sequence | None = None, cached_len: int = 0) -> Sequence:
        """A new sequence; its first ``cached_len`` tokens (whole pages) are read from the pages of ``cached``."""
        shared = cached.pages[: cached_len // self.page_size] if cached else []
        needed = -(-len(ids) // self.page_size) - len(shared)
        pages = shared + [self._free.pop() for _ in range(needed)]
        return Sequence(ids, pages, done=cached_len)

    def step(self, parts: list[tuple[Sequence, int]]) -> None:
        """One forward pass over the next tokens of several sequences."""
        width = max(len(sequence.pages) for sequence, _ in parts)
        pages = np.full((len(parts), width), -1, np.int32)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for row, (sequence, count) in enumerate(parts):
            pages[row, : len(sequence.pages)] = sequence.pages
            new = range(sequence.done, sequence.done + count)
            ids += sequence.ids[sequence.done : sequence.done + count]
            positions += new
            slots += [sequence.pages[p // self.page_size] * self.page_size + p % self.page_size for p in new]
        counts = [count for _, count in parts]
        layout = PagedLayout(
            query_starts=np.cumsum([0, *counts]).astype(np.int32),
            context_lens=np.array([sequence.done for sequence, _ in parts], np.int32),
            pages=pages,
        )
        with torch.inference_mode():
            hidden = self.model.forward(
                torch.tensor(ids),
                torch.tensor(positions),
                torch.tensor(slots),
                pool=self.pool,
                layout=layout,
                attention=self._attention,
            )
            logits = self.model.logits(hidden)
        for (sequence, count), rows in zip(parts, logits.split(counts), strict=True):
            sequence.done += count
            sequence.logits.append(rows)

    def run(self, sequence: Sequence, chunk: int | None = None) -> torch.Tensor:
        """Runs what is left of a sequence, alone, in chunks; the scores of all its positions so far."""
        while sequence.left:
            self.step([(sequence, min(chunk or sequence.left, sequence.left))])
        return sequence.all_logits()


def relative_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """||found - expected|| / ||expected|| of each row."""
    return (found - expected).norm(dim=1) / expected.norm(dim=1)
