"""Draws the next token of each sequence of a batch from its scores.

The filters apply in the order temperature, top_k, top_p, min_p, top_p to what top_k left, renormalised. Tokens of equal
score at a cut stay in the order of their ids, lowest first, so what can be drawn does not depend on how anything was
sorted.

The draw inverts the cumulative distribution in the order of ids, at a random number that is a function of (seed, index,
position): the token depends on nothing else in the batch. That holds bit for bit because every step is either one
element's own arithmetic, or a sum along one row.

A row costs what it asks for: greedy rows an argmax; temperature and min_p a few passes over the vocabulary; top_k and
top_p a partial selection, widened only where it did not reach the cut.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from engine.philox import uniforms

if TYPE_CHECKING:
    import numpy.typing as npt

    from engine.base import SamplingRows

# Highest scores looked at before a whole row is sorted: most nuclei end within the first, nearly all within the second.
_WIDTHS = (64, 1024)
# Tokens whose weights are added up together before a draw looks at single ones.
_BLOCK = 256


class Sample(NamedTuple):
    """What was drawn for S rows.

    Attributes:
        tokens: int32[S], on the device of the scores; a valid id even where ``finite`` is False.
        finite: bool[S], likewise; False where a row has a NaN or +inf, or nothing but -inf.
    """

    tokens: torch.Tensor
    finite: torch.Tensor


def sample(logits: torch.Tensor, rows: SamplingRows) -> Sample:
    """Draws a token for each row.

    Args:
        logits: float32[S, V]; -inf is never drawn. Not changed.
        rows: How, S rows of it.

    Raises:
        TypeError: The scores are not float32.
        ValueError: The numbers of rows differ.
    """
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, not {logits.dtype}")
    if logits.ndim != 2 or len(logits) != len(rows.temperature):
        raise ValueError(f"logits {list(logits.shape)} do not go with {len(rows.temperature)} rows of parameters")
    if not len(logits):
        empty = torch.empty(0, device=logits.device)
        return Sample(empty.int(), empty.bool())
    best = logits.argmax(dim=1)  # of equal scores the first; a NaN counts as highest
    finite = logits.gather(1, best[:, None]).squeeze(1).isfinite()
    best = best.masked_fill(~finite, 0)
    random = np.flatnonzero(rows.temperature > 0)
    if len(random):
        chosen = torch.from_numpy(random).to(logits.device)
        whole = len(random) == len(logits)
        scores = (logits if whole else logits[chosen]).masked_fill(~finite[chosen, None], 0.0)
        drawn = _draw(scores, best[chosen], rows, random)
        best = drawn if whole else best.index_copy(0, chosen, drawn)
    return Sample(best.int(), finite)


def _draw(scores: torch.Tensor, best: torch.Tensor, rows: SamplingRows, which: npt.NDArray[np.intp]) -> torch.Tensor:
    """Draws int64[R] for the parameters' rows ``which`` from their finite scores [R, V], the highest at ``best``."""
    device = scores.device
    temperature = torch.from_numpy(rows.temperature[which]).to(device)
    # The smallest normal number stands in for what would divide to NaN. What overflows becomes -inf, of weight 0, and
    # the maximum is 0 at any temperature.
    temperature = temperature.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    scaled = (scores - scores.gather(1, best[:, None])).div_(temperature)
    weights = scaled.exp()
    _cut(scaled, weights, rows.top_k[which], rows.top_p[which])
    min_p = rows.min_p[which]
    if (min_p > 0).any():
        # The most probable token has weight 1, and no filter takes it out.
        weights.masked_fill_(weights < torch.from_numpy(min_p).to(device)[:, None], 0.0)
    draws = torch.from_numpy(uniforms(rows.seed[which], rows.index[which], rows.position[which])).to(device)
    return _invert(weights, draws)


def _cut(
    scaled: torch.Tensor, weights: torch.Tensor, top_k: npt.NDArray[np.int32], top_p: npt.NDArray[np.float32]
) -> None:
    """Sets to 0 the weights that top_k and top_p take out."""
    vocabulary = scaled.shape[1]
    limit = np.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).astype(np.int64)
    pending = np.flatnonzero((limit < vocabulary) | (top_p < 1))
    for width in (*(width for width in _WIDTHS if width < vocabulary), vocabulary):
        # Rows whose top_k is wider than this need not try.
        tried = pending[(limit[pending] <= width) | (limit[pending] == vocabulary)]
        if len(tried):
            index = torch.from_numpy(tried).to(scaled.device)
            done = _cut_within(scaled, weights, index, width=width, limit=limit[tried], top_p=top_p[tried])
            pending = np.setdiff1d(pending, tried[done], assume_unique=True)
        if not len(pending):
            return


def _cut_within(
    scaled: torch.Tensor,
    weights: torch.Tensor,
    index: torch.Tensor,
    *,
    width: int,
    limit: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
) -> npt.NDArray[np.bool_]:
    """Cuts the rows ``index`` whose cut lies within their ``width`` highest scores; bool[R], which ones that were."""
    device, vocabulary = scaled.device, scaled.shape[1]
    row_scores, row_weights = scaled[index], weights[index]
    top = row_scores.topk(width, dim=1).values
    mass = top.exp().cumsum(1, dtype=torch.float64)
    limits = torch.from_numpy(limit).to(device)
    total = torch.where(
        limits < vocabulary,
        mass.gather(1, (limits - 1).clamp_max(width - 1)[:, None]).squeeze(1),
        _block_sums(row_weights).sum(1),
    )
    wanted = torch.from_numpy(top_p.astype(np.float64)).to(device) * total
    wanted = wanted.masked_fill(torch.from_numpy(top_p >= 1).to(device), math.inf)
    # A token stays if those before it do not make up the mass that is wanted.
    keep = torch.minimum((mass < wanted[:, None]).sum(1) + 1, limits)
    done = keep <= width
    keep = keep.clamp_max(width)
    lowest = top.gather(1, (keep - 1)[:, None])
    ties = row_scores == lowest
    room = keep[:, None] - (top > lowest).sum(1, keepdim=True)
    if bool((ties.sum(1, keepdim=True) > room).any()):
        ties &= ties.cumsum(1) <= room
    kept = ties | (row_scores > lowest) | ~done[:, None]
    weights[index] = row_weights.masked_fill_(~kept, 0.0)
    finished: npt.NDArray[np.bool_] = done.cpu().numpy()
    return finished


def _invert(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The first id, int64[R], at which the running sum of a row of float32[R, V] exceeds the draw's share of the whole.

    Sums are float64. They run over blocks first and then within one, which reads each weight once instead of writing a
    sum for each. A weight of 0 is never chosen.
    """
    blocks = _block_sums(weights).cumsum(1)
    target = _below(draws * blocks[:, -1], blocks[:, -1])
    block = torch.searchsorted(blocks, target[:, None], right=True)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp_min(0)), 0.0)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    last = weights.shape[1] - 1
    inside = weights.gather(1, ids.clamp_max(last)).masked_fill_(ids > last, 0.0).cumsum(1, dtype=torch.float64)
    rest = _below(target - before.squeeze(1), inside[:, -1])
    return (block * _BLOCK + torch.searchsorted(inside, rest[:, None], right=True)).squeeze(1)


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums of ``_BLOCK`` neighbours each, float64[R, ceil(V / _BLOCK)], of float32[R, V]."""
    padded = functional.pad(weights, (0, -weights.shape[1] % _BLOCK))
    return padded.view(len(weights), -1, _BLOCK).sum(2, dtype=torch.float64)


def _below(values: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """``values``, or where rounding took them up to the bound or beyond, the number before it."""
    return torch.minimum(values, torch.nextafter(bound, torch.zeros_like(bound)))
