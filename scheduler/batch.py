"""Turns the running sequences into one step's batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import FUTURE_TOKEN, Batch, SamplingRows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcache.ledger import Ledger
    from scheduler.request import Sampling
    from scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Planned:
    """One sequence's part in a step.

    Attributes:
        sequence: Whose.
        tokens: New tokens, at least 1.
        samples: Whether a token is sampled after them.
        prefill: Whether they are known tokens being computed (or computed again), not the one last sampled.
    """

    sequence: Sequence
    tokens: int
    samples: bool
    prefill: bool


def plan(running: Iterable[Sequence], chunk_tokens: int) -> list[Planned]:
    """Decides what each running sequence computes in the next step, in the order given.

    Every decoding sequence computes one token. Prefills share ``chunk_tokens`` beside that, first come first served, so
    that neither starves the other. A sequence whose last token is already in flight has nothing to do.
    """
    planned = []
    budget = chunk_tokens
    for sequence in running:
        if sequence.total >= sequence.limit:
            continue
        outstanding = sequence.total - sequence.launched
        if outstanding == 1 and sequence.launched >= sequence.prompt_len:
            planned.append(Planned(sequence, 1, samples=True, prefill=False))
            continue
        tokens = min(outstanding, budget)
        if tokens:
            budget -= tokens
            planned.append(Planned(sequence, tokens, samples=tokens == outstanding, prefill=True))
    return planned


class SamplingTable:
    """How each row's sequence draws its tokens: written once at admission, gathered for each step."""

    def __init__(self, max_rows: int) -> None:
        self._temperature = np.zeros(max_rows, dtype=np.float32)
        self._top_k = np.zeros(max_rows, dtype=np.int32)
        self._top_p = np.ones(max_rows, dtype=np.float32)
        self._min_p = np.zeros(max_rows, dtype=np.float32)
        self._seed = np.zeros(max_rows, dtype=np.uint64)
        self._index = np.zeros(max_rows, dtype=np.int32)

    def set(self, row: int, sampling: Sampling, index: int) -> None:
        """Row ``row`` now belongs to continuation ``index`` of a request that samples like this."""
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = sampling.seed
        self._index[row] = index

    def gather(self, rows: np.ndarray, positions: np.ndarray) -> SamplingRows:
        """The parameters of int32 ``rows``, whose next tokens are at output ``positions``."""
        return SamplingRows(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seed=self._seed[rows],
            index=self._index[rows],
            position=positions,
        )


def build(step: int, planned: list[Planned], ledger: Ledger, table: SamplingTable) -> Batch:
    """Writes the plan down as arrays; the page tables in it are snapshots, so the ledger may change at once."""
    count = len(planned)
    rows = np.empty(count, dtype=np.int32)
    query_lens = np.empty(count, dtype=np.int32)
    context_lens = np.empty(count, dtype=np.int32)
    token_ids = np.full(sum(part.tokens for part in planned), FUTURE_TOKEN, dtype=np.int32)
    sampled, positions = [], []
    start = 0
    for i, part in enumerate(planned):
        sequence = part.sequence
        holding = sequence.holding
        if holding is None:
            raise RuntimeError(f"{sequence.request.request_id} is in a batch without pages")
        rows[i], query_lens[i], context_lens[i] = holding.row, part.tokens, sequence.launched
        known = sequence.ids[sequence.launched : sequence.launched + part.tokens]
        token_ids[start : start + len(known)] = known
        start += part.tokens
        if part.samples:
            sampled.append(i)
            positions.append(sequence.total - sequence.prompt_len)
    sampled_rows = np.array(sampled, dtype=np.int32)
    width = ledger.pages_for(int((query_lens + context_lens).max()))
    return Batch(
        step=step,
        request_ids=tuple(part.sequence.request.request_id for part in planned),
        rows=rows,
        token_ids=token_ids,
        query_lens=query_lens,
        context_lens=context_lens,
        pages=np.ascontiguousarray(ledger.table[rows, :width]),
        sampled=sampled_rows,
        sampling=table.gather(rows[sampled_rows], np.array(positions, dtype=np.int32)),
    )
