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
_WIDTHS = (64, 1024, 8192)
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
    device, vocabulary = scaled.device, scaled.shape[1]
    limit = np.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).astype(np.int64)
    pending = np.flatnonzero((limit < vocabulary) | (top_p < 1))
    if not len(pending):
        return
    limits = torch.from_numpy(limit).to(device)
    share = torch.from_numpy(np.where(top_p < 1, top_p.astype(np.float64), math.inf)).to(device)
    totals = _block_sums(weights).sum(1) if (limit[pending] == vocabulary).any() else torch.zeros_like(share)
    for width in (*(width for width in _WIDTHS if width < vocabulary), vocabulary):
        # Rows whose top_k is wider than this need not try.
        tried = pending[(limit[pending] <= width) | (limit[pending] == vocabulary)]
        if not len(tried):
            continue
        rows = torch.from_numpy(tried).to(device)
        top = (scaled if len(tried) == len(scaled) else scaled[rows]).topk(width, dim=1).values
        keep = _count_kept(top, limits[rows], share[rows], totals[rows], vocabulary)
        done = keep <= width
        _drop_below(scaled, weights, rows[done], top[done], keep[done])
        pending = np.setdiff1d(pending, tried[done.cpu().numpy()], assume_unique=True)
        if not len(pending):
            return


def _count_kept(
    top: torch.Tensor, limit: torch.Tensor, share: torch.Tensor, total: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """How many of its highest scores ``top`` [R, W], descending, each row keeps, int64[R]; above W if more than W.

    A token stays if those before it do not make up the share that is wanted, of what top_k leaves or of ``total``.
    """
    mass = top.exp().cumsum(1, dtype=torch.float64)
    left_by_top_k = mass.gather(1, (limit - 1).clamp_max(top.shape[1] - 1)[:, None]).squeeze(1)
    wanted = share * torch.where(limit < vocabulary, left_by_top_k, total)
    return torch.minimum((mass < wanted[:, None]).sum(1) + 1, limit)


def _drop_below(
    scaled: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, top: torch.Tensor, keep: torch.Tensor
) -> None:
    """Sets to 0 the weights of ``rows`` but for the ``keep`` highest scores, of equal ones the lowest ids.

    ``top`` [R, W] has the W highest scores of these rows, descending; ``keep`` is int64[R], at most W.
    """
    every = len(rows) == len(scaled)
    scores, kept = (scaled, weights) if every else (scaled[rows], weights[rows])
    width, vocabulary = top.shape[1], scaled.shape[1]
    lowest = top.gather(1, (keep - 1)[:, None])
    dropped = scores < lowest
    next_score = top.gather(1, keep.clamp_max(width - 1)[:, None])
    if width < vocabulary:
        next_score = next_score.masked_fill((keep == width)[:, None], math.inf)
    if bool((next_score >= lowest).any()):  # the cut may fall between equal scores
        ties = scores == lowest
        room = keep[:, None] - (top > lowest).sum(1, keepdim=True)
        dropped |= ties & (ties.cumsum(1) > room)
    kept.masked_fill_(dropped, 0.0)
    if not every:
        weights[rows] = kept


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
