from __future__ import annotations

import pytest
import torch

from kvcache.pool import KVPool, PoolMemoryError, bytes_per_token


def make(**changes: int) -> KVPool:
    sizes = {"layers": 3, "num_pages": 5, "page_size": 4, "kv_heads": 2, "head_dim": 8} | changes
    return KVPool(**sizes, dtype=torch.bfloat16)


def test_each_layer_has_zeroed_keys_and_values_with_a_scratch_page_beyond_the_count() -> None:
    pool = make()
    assert (len(pool.keys), len(pool.values), pool.num_pages, pool.page_size) == (3, 3, 5, 4)
    for tensor in (*pool.keys, *pool.values):
        assert tensor.shape == (6, 4, 2, 8)
        assert tensor.is_contiguous()
        assert not tensor.any()
    assert len({tensor.data_ptr() for tensor in (*pool.keys, *pool.values)}) == 6


def test_bytes_per_token_are_what_a_slot_takes_in_all_tensors() -> None:
    pool = make()
    total = sum(tensor.numel() * tensor.element_size() for tensor in (*pool.keys, *pool.values))
    assert pool.bytes_per_token == bytes_per_token(3, 2, 8, torch.bfloat16) == total / (6 * 4)


@pytest.mark.parametrize("name", ["layers", "num_pages", "page_size", "kv_heads", "head_dim"])
def test_a_count_that_is_not_positive_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        make(**{name: 0})


def test_a_pool_beyond_all_memory_is_a_memory_error_that_says_its_size() -> None:
    with pytest.raises(PoolMemoryError, match=r"KV pool of 1099511627776 pages of 4 tokens \(786432\.0 GiB\)"):
        make(num_pages=2**40)
    assert issubclass(PoolMemoryError, MemoryError)
