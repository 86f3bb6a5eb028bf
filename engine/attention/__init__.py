"""Attention of new tokens over paged keys and values: one interface, and a backend for each way to compute it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from engine.attention.base import AttentionBackend, PagedLayout

if TYPE_CHECKING:
    from engine.attention.native import NativeAttention
    from engine.attention.reference import ReferenceAttention

__all__ = ["AttentionBackend", "PagedLayout", "open_attention"]


def open_attention(threads: int) -> NativeAttention | ReferenceAttention:
    """Returns the best backend that this machine's CPU can run.

    Falls back to ``ReferenceAttention``, with a warning in the log, where ``engine._kernels`` was not built.

    Args:
        threads: How many threads compute, at least 1. The reference uses torch's threads instead.
    """
    try:
        from engine.attention.native import NativeAttention  # noqa: PLC0415 - the module may be absent
    except ImportError as error:
        from engine.attention.reference import ReferenceAttention  # noqa: PLC0415 - loads torch; only if needed

        structlog.get_logger().warning("attention_kernel_missing", backend="reference", reason=str(error))
        return ReferenceAttention()
    return NativeAttention(threads)
