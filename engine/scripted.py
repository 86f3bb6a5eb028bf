"""An engine that plays a script: chosen tokens or logits, chosen step times, chosen faults; and no model.

It is a real engine to everything above it: launches run in order on a forward thread, tokens pass through the
future-token table, and KV lives in a paged pool. A request that no script names is answered by the pool itself: each
slot keeps a fingerprint of the token and position that were written there, and the next token is a hash of the
fingerprints that the sequence's page table points at. So a page that was freed too early, shared wrongly or never
written changes the text, while batching, chunking, preemption and cache hits do not.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.base import FUTURE_TOKEN, Batch, EngineError, ModelSpec, StepResult
from engine.device.cpu import ForwardThread
from engine.sampling import sample
from engine.script import Part, Script, read_script

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from engine.base import Int32Array, SamplingRows

DEFAULT_POOL_TOKENS = 65_536

IntArray = npt.NDArray[np.signedinteger[Any]]
UInt64Array = npt.NDArray[np.uint64]
_T = TypeVar("_T")


class Launches(Protocol):
    """Runs functions in the order they were submitted."""

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Queues ``function``; the future resolves to what it returns or raises."""
        ...

    def close(self) -> None:
        """Resolves what did not run to a sticky EngineError."""
        ...


class ScriptedEngine:
    """Plays ``script``; implements ``engine.base.Engine``.

    Args:
        script: What to play.
        page_size: Tokens in a page.
        pool_tokens: Tokens in the pool, rounded down to pages.
        max_rows: Rows of the future-token table.
        context: Overrides the script's context, where given.
        launches: What runs the launches; by default a forward thread of its own. Simulations turn their own crank.
    """

    def __init__(
        self,
        script: Script,
        *,
        page_size: int,
        pool_tokens: int | None,
        max_rows: int,
        context: int | None = None,
        launches: Launches | None = None,
    ) -> None:
        self.script = script
        self._page_size = page_size
        self._num_pages = (DEFAULT_POOL_TOKENS if pool_tokens is None else pool_tokens) // page_size
        if self._num_pages < 1:
            raise ValueError(f"a pool of {pool_tokens} tokens is smaller than a page of {page_size}")
        self._spec = ModelSpec(
            name=script.name,
            architecture="scripted",
            vocab_size=len(script.pieces),
            context_length=script.context if context is None else context,
            device="cpu",
            dtype="scripted",
        )
        self._fingerprints = np.zeros(self._num_pages * page_size, dtype=np.uint64)
        self._future = np.zeros(max_rows, dtype=np.int32)
        plain = [i for i, piece in enumerate(script.pieces) if i not in script.special_ids and piece]
        printable = [i for i in plain if script.pieces[i].isascii() and script.pieces[i].decode().isprintable()]
        self._alphabet = np.array(printable or plain or [0], dtype=np.int32)
        self._launched: Batch | None = None
        self._closed = threading.Event()
        self._launches = launches or ForwardThread("scripted-engine")

    @classmethod
    def from_file(
        cls, path: Path, *, page_size: int, pool_tokens: int | None, max_rows: int, context: int | None = None
    ) -> ScriptedEngine:
        """Reads the script at ``path``; raises ModelLoadError as ``read_script`` does."""
        script = read_script(path)
        return cls(script, page_size=page_size, pool_tokens=pool_tokens, max_rows=max_rows, context=context)

    @property
    def spec(self) -> ModelSpec:
        """The scripted model."""
        return self._spec

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._page_size

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self._num_pages

    @property
    def max_rows(self) -> int:
        """Rows of the future-token table."""
        return len(self._future)

    def forward(self, batch: Batch) -> None:
        """Launches ``batch``."""
        self._launched = batch
        self._forwarded = self._launches.submit(lambda: self._write(batch))

    def sample(self, masks: None = None) -> Future[StepResult]:
        """Launches the sampling of the batch last given to ``forward``."""
        if masks is not None:
            raise ValueError("masks are not supported yet")
        batch, forwarded = self._launched, self._forwarded
        if batch is None:
            raise RuntimeError("sample needs a forward before it")

        def draw() -> StepResult:
            forwarded.result()
            return self._draw(batch)

        return self._launches.submit(draw)

    def close(self) -> None:
        """Ends the engine, a hanging step included."""
        self._closed.set()
        self._launches.close()

    # On the forward thread.

    def _write(self, batch: Batch) -> None:
        """Takes the step's time, plays its faults, and writes the new tokens' fingerprints."""
        script = self.script
        parts = [script.part(request_id) for request_id in batch.request_ids]
        milliseconds = script.step_ms + len(batch.token_ids) * script.token_us / 1000
        milliseconds += sum(part.step_ms for part in parts if part is not None)
        if milliseconds:
            time.sleep(milliseconds / 1000)
        positions = _output_positions(batch)
        if script.hang_at == batch.step or _reached(parts, positions, "hang_at") is not None:
            self._closed.wait()
            raise EngineError("the scripted engine hung until it was closed", sticky=True)
        if script.fail_at == batch.step:
            raise EngineError(f"the script fails step {batch.step}")
        failing = _reached(parts, positions, "fail_at")
        if failing is not None:
            where = f"{batch.request_ids[failing]!r} at position {positions[failing]}"
            raise EngineError(f"the script fails {where}, in step {batch.step}")
        starts = np.cumsum(batch.query_lens) - batch.query_lens
        tokens = batch.token_ids.copy()
        unknown = np.flatnonzero(tokens == FUTURE_TOKEN)
        owner = np.searchsorted(starts, unknown, side="right") - 1
        tokens[unknown] = self._future[batch.rows[owner]]
        sequence = np.repeat(np.arange(len(starts)), batch.query_lens)
        position = np.arange(len(tokens)) - starts[sequence] + batch.context_lens[sequence]
        self._fingerprints[self._slots(batch.pages, sequence, position)] = _mix(tokens.astype(np.uint64), position)

    def _draw(self, batch: Batch) -> StepResult:
        """Chooses a token for each sequence that samples, and leaves it in the future-token table."""
        tokens = np.zeros(len(batch.sampled), dtype=np.int32)
        finite = np.ones(len(batch.rows), dtype=np.bool_)
        for i, b in enumerate(batch.sampled):
            part = self.script.part(batch.request_ids[b])
            position = int(batch.sampling.position[i])
            if part is not None and part.nan_at is not None and position >= part.nan_at:
                finite[b] = False
            elif part is not None and part.logits is not None:
                tokens[i], finite[b] = self._sampled(part.logits, batch.sampling, i)
            elif part is not None and part.tokens:
                tokens[i] = self._scripted(part, int(batch.sampling.index[i]), position)
            else:
                tokens[i] = self._hashed(batch, int(b), i)
        self._future[batch.rows[batch.sampled]] = tokens
        return StepResult(tokens, finite)

    def _sampled(self, logits: npt.NDArray[np.float32], rows: SamplingRows, i: int) -> tuple[int, bool]:
        row = logits[min(int(rows.position[i]), len(logits) - 1)]
        one = type(rows)(**{name: getattr(rows, name)[i : i + 1] for name in rows.__dataclass_fields__})
        drawn = sample(torch.from_numpy(row[None].copy()), one)
        return int(drawn.tokens[0]), bool(drawn.finite[0])

    def _scripted(self, part: Part, index: int, position: int) -> int:
        tokens = part.tokens[min(index, len(part.tokens) - 1)]
        if position < len(tokens):
            return tokens[position]
        return tokens[position % len(tokens)] if part.loop else min(self.script.eos_ids)

    def _hashed(self, batch: Batch, b: int, i: int) -> int:
        """A token that depends on all that the page table of sequence ``b`` points at, and on its seed if it draws."""
        length = int(batch.context_lens[b] + batch.query_lens[b])
        position = np.arange(length)
        slots = self._slots(batch.pages, np.full(length, b), position)
        with np.errstate(over="ignore"):
            value = _mix(self._fingerprints[slots], position).sum(dtype=np.uint64)
            if batch.sampling.temperature[i] > 0:
                value ^= _mix(batch.sampling.seed[i : i + 1], batch.sampling.index[i : i + 1])[0]
        return int(self._alphabet[int(value % np.uint64(len(self._alphabet)))])

    def _slots(self, pages: Int32Array, sequence: IntArray, position: IntArray) -> Int32Array:
        slots: Int32Array = pages[sequence, position // self._page_size] * self._page_size + position % self._page_size
        return slots


def _output_positions(batch: Batch) -> list[int | None]:
    """For each sequence the output position it samples in this step, or None."""
    positions: list[int | None] = [None] * len(batch.rows)
    for b, position in zip(batch.sampled.tolist(), batch.sampling.position.tolist(), strict=True):
        positions[b] = position
    return positions


def _reached(parts: list[Part | None], positions: list[int | None], fault: str) -> int | None:
    """The first sequence that samples the position of its part's fault in this step."""
    for b, (part, position) in enumerate(zip(parts, positions, strict=True)):
        if part is not None and position is not None and getattr(part, fault) == position:
            return b
    return None


def _mix(values: UInt64Array, salt: npt.NDArray[np.integer[Any]]) -> UInt64Array:
    """Scrambles uint64 values with their salts: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        mixed = values * np.uint64(0x9E3779B97F4A7C15) + (salt.astype(np.uint64) + np.uint64(1)) * np.uint64(
            0xD1B54A32D192ED03
        )
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        scrambled: UInt64Array = mixed ^ (mixed >> np.uint64(31))
    return scrambled
