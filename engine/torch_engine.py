"""The engine that runs a model in torch, on the CPU.

``forward`` and ``sample`` queue work on the forward thread and return; everything else happens there, in order. The
future-token table lives beside the model: ``sample`` writes what it drew to the rows of its sequences, the next
``forward`` reads it there, and the host learns it whenever it looks. A step that fails takes nothing with it but
itself: its future gets an EngineError, and the steps behind it run.

Whether a sequence's numbers are finite is read off its last token: a NaN or infinity in any earlier one reaches the
last through attention, layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.attention import PagedLayout, open_attention
from engine.attention.checks import MAX_HEAD_DIM
from engine.base import FUTURE_TOKEN, Batch, EngineError, ModelLoadError, ModelSpec, StepResult
from engine.device.cpu import ForwardThread, available_memory, supports_bfloat16, usable_threads
from engine.model_path import display_name
from engine.models.registry import load_model
from engine.sampling import sample
from engine.weights.gguf import GGUFFile
from kvcache.pool import KVPool, PoolMemoryError, bytes_per_token

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy.typing as npt

    from engine.models.base import Model

DEFAULT_POOL_TOKENS = 65_536
"""Tokens of the KV pool where nobody says how many; fewer where they would take more than half of the free memory."""


@dataclass(slots=True)
class _Step:
    """A launched batch. The thread fills in what sampling needs; ``failure`` is why it could not."""

    batch: Batch
    last_hidden: torch.Tensor | None = None
    failure: EngineError | None = None


class TorchEngine:
    """Runs one model over one KV pool; see ``engine.base.Engine``.

    Args:
        model_path: A GGUF file.
        name: The model's name as clients see it; None takes it from the file's name.
        temperature: What requests that name none are drawn with; None takes it from the file, or 1.0.
        dtype: "bfloat16", "float32", or "auto": bfloat16 where the CPU multiplies it in hardware.
        page_size: Tokens in a page of the KV pool.
        pool_tokens: Tokens that the pool holds, rounded down to pages; None means ``DEFAULT_POOL_TOKENS`` or what fits.
        max_rows: Rows of the future-token table.
        threads: CPU threads to compute with; None means all that this process may use.
        context: Tokens of prompt and output together; None means what the model was trained for.

    Raises:
        ModelLoadError: The model cannot be served, or not with this context.
        PoolMemoryError: There is no memory for the KV pool.
        ValueError: Another argument is out of range.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        name: str | None = None,
        temperature: float | None = None,
        dtype: str = "auto",
        page_size: int = 16,
        pool_tokens: int | None = None,
        max_rows: int = 256,
        threads: int | None = None,
        context: int | None = None,
    ) -> None:
        if max_rows < 1 or page_size < 1 or (threads is not None and threads < 1):
            raise ValueError(f"max_rows {max_rows}, page_size {page_size} and threads {threads} must be at least 1")
        torch_dtype = _dtype(dtype)
        threads = threads or usable_threads()
        self._model, architecture, file_temperature = _load(model_path, torch_dtype)
        shape = self._model.shape
        context = shape.context_length if context is None else context
        if not 1 <= context <= shape.context_length:
            raise ModelLoadError(
                f"{model_path}: has a context of {shape.context_length} tokens; {context} cannot be served"
            )
        self._spec = ModelSpec(
            name=name or display_name(model_path),
            architecture=architecture,
            vocab_size=shape.vocab_size,
            context_length=context,
            device="cpu",
            dtype=str(torch_dtype).removeprefix("torch."),
            default_temperature=file_temperature if temperature is None else temperature,
        )
        self._pool = _make_pool(self._model, page_size, pool_tokens)
        self._attention = open_attention(threads)
        # One row more than is handed out, for padding.
        self._future_tokens = torch.zeros(max_rows + 1, dtype=torch.int32)
        self._max_rows = max_rows
        self._launched: _Step | None = None
        self._thread = ForwardThread("radixd-forward", partial(torch.set_num_threads, threads))

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self._spec

    @property
    def page_size(self) -> int:
        """Tokens in a page of the KV pool."""
        return self._pool.page_size

    @property
    def num_pages(self) -> int:
        """Pages in the KV pool, numbered from 0."""
        return self._pool.num_pages

    @property
    def max_rows(self) -> int:
        """Rows of the future-token table."""
        return self._max_rows

    def forward(self, batch: Batch) -> None:
        """Queues the forward pass of ``batch``. If it fails, the future that ``sample`` returns for it says so."""
        self._launched = step = _Step(batch)
        self._thread.submit(partial(self._run_forward, step))

    def sample(self, masks: None = None) -> Future[StepResult]:
        """Queues the sampling of the batch last given to ``forward``.

        Raises:
            EngineError: There is none that has not been sampled.
        """
        del masks
        step, self._launched = self._launched, None
        if step is None:
            raise EngineError("sample was called without a forward before it")
        return self._thread.submit(partial(self._run_sample, step))

    def close(self) -> None:
        """Lets the running launch end and resolves those behind it to a sticky EngineError. May be called again."""
        self._thread.close()

    def _run_forward(self, step: _Step) -> None:
        try:
            with torch.inference_mode():
                step.last_hidden = self._last_hidden(step.batch)
        except Exception as error:  # whatever torch or a kernel raises fails this step, and this step alone
            step.failure = _failure(step, error)

    def _run_sample(self, step: _Step) -> StepResult:
        if step.failure is not None:
            raise step.failure
        try:
            with torch.inference_mode():
                return self._draw(step)
        except Exception as error:
            raise _failure(step, error) from error

    def _last_hidden(self, batch: Batch) -> torch.Tensor:
        """Runs the model on the batch; [B, hidden], of each sequence's last new token."""
        inputs = _Inputs.of(batch)
        self._check(batch, inputs)
        token_ids = torch.from_numpy(batch.token_ids.astype(np.int64))
        unknown = np.flatnonzero(batch.token_ids == FUTURE_TOKEN)
        if len(unknown):
            rows = torch.from_numpy(batch.rows[inputs.sequences[unknown]].astype(np.int64))
            token_ids[torch.from_numpy(unknown)] = self._future_tokens[rows].long()
        hidden = self._model.forward(
            token_ids,
            torch.from_numpy(inputs.positions),
            torch.from_numpy(inputs.slots(batch.pages, self.page_size)),
            pool=self._pool,
            layout=PagedLayout(inputs.starts, batch.context_lens, np.ascontiguousarray(batch.pages)),
            attention=self._attention,
        )
        return hidden[torch.from_numpy(inputs.starts[1:].astype(np.int64) - 1)]

    def _draw(self, step: _Step) -> StepResult:
        batch, hidden = step.batch, step.last_hidden
        if hidden is None:
            raise EngineError("its forward pass did not run")
        step.last_hidden = None
        finite = hidden.isfinite().all(dim=1)
        sampled = torch.from_numpy(batch.sampled.astype(np.int64))
        tokens, finite_logits = sample(self._model.logits(hidden[sampled]), batch.sampling)
        finite[sampled] &= finite_logits
        self._future_tokens[torch.from_numpy(batch.rows[batch.sampled].astype(np.int64))] = tokens
        return StepResult(tokens=tokens.numpy(), finite=finite.numpy())

    def _check(self, batch: Batch, inputs: _Inputs) -> None:
        """Refuses what would read or write outside the pool, the table or the vocabulary."""
        if inputs.starts[-1] != len(batch.token_ids) or batch.query_lens.min(initial=1) < 1:
            raise ValueError("query_lens do not divide token_ids")
        lengths = batch.context_lens + batch.query_lens
        if batch.context_lens.min(initial=0) < 0 or lengths.max(initial=0) > self._spec.context_length:
            raise ValueError(f"a sequence is longer than the context of {self._spec.context_length} tokens")
        used = -(-lengths // self.page_size)
        if used.max(initial=0) > batch.pages.shape[1]:
            raise ValueError("a page table is too short for its sequence")
        pages = batch.pages[np.arange(batch.pages.shape[1]) < used[:, None]]
        if pages.min(initial=0) < 0 or pages.max(initial=0) > self.num_pages:
            raise ValueError(f"a page is not one of the pool's {self.num_pages}")
        if batch.token_ids.min(initial=0) < FUTURE_TOKEN or batch.token_ids.max(initial=0) >= self._spec.vocab_size:
            raise ValueError(f"a token id is not in the vocabulary of {self._spec.vocab_size}")
        if batch.rows.min(initial=0) < 0 or batch.rows.max(initial=0) > self._max_rows:
            raise ValueError(f"a row is not one of the future-token table's {self._max_rows}")


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What follows from a batch: starts int32[B + 1], and of each token its sequence and position, int64[T]."""

    starts: npt.NDArray[np.int32]
    sequences: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]

    @classmethod
    def of(cls, batch: Batch) -> _Inputs:
        starts = np.zeros(len(batch.query_lens) + 1, np.int32)
        np.cumsum(batch.query_lens, out=starts[1:])
        sequences = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
        first = batch.context_lens.astype(np.int64) - starts[:-1]
        return cls(starts, sequences, np.arange(starts[-1]) + first[sequences])

    def slots(self, pages: npt.NDArray[np.int32], page_size: int) -> npt.NDArray[np.int64]:
        page, offset = np.divmod(self.positions, page_size)
        return pages[self.sequences, page].astype(np.int64) * page_size + offset


def _failure(step: _Step, error: Exception) -> EngineError:
    failure = EngineError(f"step {step.batch.step} failed: {error}")
    failure.__cause__ = error
    return failure


def _dtype(name: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if supports_bfloat16() else torch.float32
    known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in known:
        raise ValueError(f"dtype must be auto, bfloat16 or float32, not {name!r}")
    return known[name]


def _load(path: Path, dtype: torch.dtype) -> tuple[Model, str, float]:
    # Weights that were read leave the file behind: its index of a large vocabulary takes more memory than a step does.
    file = GGUFFile(Path(path))
    model = load_model(file, dtype)
    head_dim = model.shape.head_dim
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise file.error(f"has heads of width {head_dim}; attention needs a multiple of 8 up to {MAX_HEAD_DIM}")
    return model, file.architecture, file.number("general.sampling.temp", 1.0)


def _make_pool(model: Model, page_size: int, tokens: int | None) -> KVPool:
    shape = model.shape
    if tokens is None:
        fits = available_memory() // 2 // bytes_per_token(shape.layers, shape.kv_heads, shape.head_dim, model.dtype)
        tokens = min(DEFAULT_POOL_TOKENS, fits)
        if tokens < page_size:
            raise PoolMemoryError("no memory for a KV pool of even one page")
    elif tokens < page_size:
        raise ValueError(f"a pool of {tokens} tokens does not hold one page of {page_size}")
    return KVPool(
        layers=shape.layers,
        num_pages=tokens // page_size,
        page_size=page_size,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=model.dtype,
    )
