"""A matrix product with fixed weights, in the layout that the CPU's matrix kernels like best.

oneDNN reads bfloat16 weights in blocks; packed once, a product of one or a few rows takes half the time that it takes
with the plain matrix, because it then runs at the speed of memory. Float32 products gain nothing from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

# Rows that the packed layout is chosen for: a batch of decodes. Any number of rows gives the right product.
_TYPICAL_ROWS = 32


class Linear:
    """``x @ weight.T``, without bias.

    Args:
        weight: [out, in], float32 or bfloat16. Kept, unless a packed copy takes its place.
    """

    __slots__ = ("_multiply", "_weight")

    def __init__(self, weight: torch.Tensor) -> None:
        packed = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and torch._C._has_mkldnn
        self._weight: torch.Tensor
        self._multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
        if packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
            self._multiply = _multiply_packed
        else:
            self._weight = weight
            self._multiply = functional.linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product [T, out], of x [T, in] of the weights' dtype; accumulated in float32, rounded once."""
        return self._multiply(x, self._weight)


def _multiply_packed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product
