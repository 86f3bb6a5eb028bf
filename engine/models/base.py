"""What every model architecture offers to the engine that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from engine.attention.base import AttentionBackend, PagedLayout
    from kvcache.pool import KVPool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What an engine needs to know of a model to feed it and to size its KV pool.

    Attributes:
        vocab_size: Ids are in [0, vocab_size).
        context_length: Tokens that its positions were trained for.
        layers: Layers that keep keys and values.
        kv_heads: Key and value heads in each.
        head_dim: Width of a head.
    """

    vocab_size: int
    context_length: int
    layers: int
    kv_heads: int
    head_dim: int


class Model(Protocol):
    """One model's weights and its forward pass."""

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations, keys and values."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        *,
        pool: KVPool,
        layout: PagedLayout,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Runs T new tokens of B sequences through every layer, as one matrix.

        Args:
            token_ids: int64[T], the sequences' new tokens one after another.
            positions: int64[T], each token's position in its sequence.
            slots: int64[T], where its key and value go: page * page_size + offset. No slot twice.
            pool: Holds the keys and values of what came before; those of the new tokens are written to it.
            layout: Where each sequence's tokens and pages are.
            attention: Reads the pool.

        Returns:
            The last hidden states, normalised, ready for ``logits``: [T, hidden], of the model's dtype.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The scores of every next token, float32[S, vocab_size], of some rows of what ``forward`` returned."""
        ...
