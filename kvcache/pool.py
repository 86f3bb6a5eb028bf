"""The memory that holds keys and values: for each layer, pages of slots.

Layer-major, and within a layer one tensor for keys and one for values, because a forward pass works on one layer at a
time and attention reads keys and values in separate passes. The memory is zeroed and touched once, at the start: a slot
that was never written holds no NaN, and a machine that is too small says so before it serves.

One page more than the count lies at the end. It is scratch: work that must write somewhere but means nothing, such as a
padded row, writes there, and no page table that anyone reads points at it.
"""

from __future__ import annotations

import torch


class PoolMemoryError(MemoryError):
    """The memory for the pool is not to be had."""


class KVPool:
    """Keys and values of ``num_pages`` pages, in every layer.

    Args:
        layers: Layers of the model.
        num_pages: Pages, numbered from 0; page ``num_pages`` is the scratch page.
        page_size: Slots in a page.
        kv_heads: Key and value heads in a layer.
        head_dim: Width of a head.
        dtype: Of keys and values.
        device: Where they are.

    Attributes:
        keys: One tensor [num_pages + 1, page_size, kv_heads, head_dim] for each layer, contiguous.
        values: As ``keys``.

    Raises:
        ValueError: A count is not positive.
        PoolMemoryError: There is not that much memory.
    """

    def __init__(
        self,
        *,
        layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        counts = {
            "layers": layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
        }
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} must be at least 1, not {count}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.bytes_per_token = bytes_per_token(layers, kv_heads, head_dim, dtype)
        shape = (num_pages + 1, page_size, kv_heads, head_dim)
        try:
            self.keys = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers))
            self.values = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers))
        except (MemoryError, RuntimeError) as error:  # torch's CPU allocator raises RuntimeError
            size = (num_pages + 1) * page_size * self.bytes_per_token
            raise PoolMemoryError(
                f"no memory for a KV pool of {num_pages} pages of {page_size} tokens ({size / 2**30:.1f} GiB)"
            ) from error


def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that the keys and values of one token take, over all layers."""
    return 2 * layers * kv_heads * head_dim * dtype.itemsize
