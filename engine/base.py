"""What the scheduler asks of an engine, whatever runs the model.

One step is two launches: ``forward`` (embeddings to last hidden states; never waits for the host) and ``sample``
(logits to tokens; may wait for a mask that the host computes meanwhile). Launches return at once and run in launch
order. The tokens stay on the device in the *future-token table*, one entry for each row of the page table, where the
next step reads them before the host has seen them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from concurrent.futures import Future

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

FUTURE_TOKEN = -1
"""In ``Batch.token_ids``: the token that the sequence's previous step sampled, still on the device."""


class EngineError(Exception):
    """A step failed: the requests in it fail, others go on.

    Args:
        message: What went wrong, for a log and a status.
        sticky: The device is lost; no later step can succeed.
    """

    def __init__(self, message: str, *, sticky: bool = False) -> None:
        super().__init__(message)
        self.sticky = sticky


class ModelLoadError(Exception):
    """A model cannot be served: missing, broken, or of a kind that is not supported. The message is one clear line."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What everyone but the engine needs to know of a model.

    Attributes:
        name: The model's name as clients see it.
        architecture: Its family, such as "llama".
        vocab_size: Ids are in [0, vocab_size).
        context_length: Prompt and output together, in tokens.
        device: Where it runs, such as "cpu".
        dtype: The type of activations and KV, such as "bfloat16".
        default_temperature: What requests that name none are drawn with.
    """

    name: str
    architecture: str
    vocab_size: int
    context_length: int
    device: str
    dtype: str
    default_temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How to draw one token for each of S sequences; a struct of arrays, each of length S.

    Attributes:
        temperature: float32; 0 is greedy.
        top_k: int32; 0 is off.
        top_p: float32 in (0, 1]; 1 is off.
        min_p: float32 in [0, 1]; 0 is off.
        seed: uint64.
        index: int32, which continuation of its request.
        position: int32, how many tokens this continuation has generated before this one.
    """

    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array
    seed: npt.NDArray[np.uint64]
    index: Int32Array
    position: Int32Array


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work: B sequences, T new tokens in all, S sequences that sample. Arrays are snapshots, not views.

    Attributes:
        step: Counts launches from 1.
        request_ids: B ids, for scripts, traces and logs.
        rows: int32[B], each sequence's row in the future-token table.
        token_ids: int32[T], the sequences' new tokens one after another; FUTURE_TOKEN where the host does not know it.
        query_lens: int32[B], new tokens of each sequence, at least 1; they sum to T.
        context_lens: int32[B], tokens of each sequence whose KV is in the pool before this step.
        pages: int32[B, P], page tables; entries beyond a sequence's last page are unspecified.
        sampled: int32[S], which sequences (indices into B) sample after their last new token, ascending.
        sampling: How these draw.
    """

    step: int
    request_ids: tuple[str, ...]
    rows: Int32Array
    token_ids: Int32Array
    query_lens: Int32Array
    context_lens: Int32Array
    pages: Int32Array
    sampled: Int32Array
    sampling: SamplingRows


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave, once the host may read it.

    Attributes:
        tokens: int32[S], in the order of ``Batch.sampled``.
        finite: bool[B], False where a sequence's numbers were not finite: its tokens and KV are not to be used.
    """

    tokens: Int32Array
    finite: npt.NDArray[np.bool_]


class Engine(Protocol):
    """Runs one model over one KV pool."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens in a page of the KV pool."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages in the KV pool that the scheduler may hand out, numbered from 0."""
        ...

    @property
    def max_rows(self) -> int:
        """Rows of the future-token table."""
        ...

    def forward(self, batch: Batch) -> None:
        """Launches the forward pass of ``batch``: writes the new tokens' KV, keeps the hidden states to sample from."""
        ...

    def sample(self, masks: None = None) -> Future[StepResult]:
        """Launches the sampling of the batch last given to ``forward``.

        Args:
            masks: Grammar masks; none are supported yet.

        Returns:
            Resolves, on the engine's thread, when the host may read the step's tokens; or to an EngineError.
        """
        ...

    def close(self) -> None:
        """Ends the engine. Launched steps that did not run resolve to a sticky EngineError."""
        ...
