"""What one Generate call will write next: the scheduler's listener at one end, the call's writer at the other.

The scheduler tells of tokens one at a time and never waits; the writer goes as fast as its client reads. Between them
lies what is pending: whatever gathered while the writer was busy leaves as one Delta for each index, so a slow
reader costs the text and ids it has not read, once, and not one message for each token. A Delta is never empty.

Both ends live on one event loop, so nothing here is locked.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf import duration_pb2
from radixd.v1 import generate_pb2 as pb

from scheduler.request import Outcome, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from scheduler.errors import RequestError
    from service.text import TextOutput

DELTA_TOKENS = 4096
"""A Delta closes at this many tokens, which keeps a whole context's backlog under a client's message limit."""

_REASONS = {
    Reason.STOP: pb.FINISH_REASON_STOP,
    Reason.LENGTH: pb.FINISH_REASON_LENGTH,
    Reason.ABORTED: pb.FINISH_REASON_ABORTED,
}


@dataclass(slots=True)
class _Piece:
    """The makings of one Delta."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    tokens: int = 0


@dataclass(slots=True)
class _Continuation:
    """One index: its text so far and what of it is not written yet."""

    output: TextOutput
    pieces: list[_Piece] = field(default_factory=list)
    finished: pb.Finished | None = None
    ended: bool = False

    def add(self, text: str, ids: list[int]) -> bool:
        """Returns whether there is anything to write."""
        if not text and not ids:
            return bool(self.pieces)
        if not self.pieces or self.pieces[-1].tokens >= DELTA_TOKENS:
            self.pieces.append(_Piece())
        piece = self.pieces[-1]
        piece.tokens += 1
        if text:
            piece.texts.append(text)
        piece.ids += ids
        return True


class TokenStream:
    """Turns what happens to one request into its responses; a ``scheduler.request.Listener``.

    Args:
        outputs: One for each index.
        started: The Started message, complete but for ``cached_tokens``.
        want_ids: Put token ids beside the text, without delay.

        clock: Seconds, monotonic.

    Attributes:
        error: What the call must end with after everything pending was written; None is OK.
        outcomes: How each index ended, in order of ending.
        completion_tokens: Tokens generated so far, in all indices.
        admitted: When the request was admitted, by the clock; None is not yet. Likewise for its first and last token.
    """

    def __init__(
        self,
        outputs: Sequence[TextOutput],
        started: pb.Started,
        *,
        want_ids: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.error: RequestError | None = None
        self.outcomes: list[Outcome] = []
        self.completion_tokens = 0
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._clock = clock
        self._continuations = [_Continuation(output) for output in outputs]
        self._started = started
        self._started_pending = False
        self._want_ids = want_ids
        self._running = len(outputs)
        self._ready = asyncio.Event()

    @property
    def n(self) -> int:
        """Continuations."""
        return len(self._continuations)

    @property
    def prompt_tokens(self) -> int:
        """Tokens in the prompt."""
        return self._started.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Of these, tokens that came from the cache."""
        return self._started.cached_tokens

    # The scheduler's end.

    def started(self, cached_tokens: int) -> None:
        """See ``Listener``."""
        self.admitted = self._clock()
        self._started.cached_tokens = cached_tokens
        self._started_pending = True
        self._ready.set()

    def token(self, index: int, token_id: int) -> bool:
        """See ``Listener``; True once a stop string appeared."""
        self._count()
        continuation = self._continuations[index]
        event = continuation.output.push(token_id)
        if continuation.add(event.text, [token_id] if self._want_ids else []):
            self._ready.set()
        return event.stop_string is not None

    def finished(self, index: int, outcome: Outcome) -> None:
        """See ``Listener``."""
        continuation = self._continuations[index]
        stop_id = outcome.stop_token_id
        if stop_id is not None:
            self._count()
        continuation.add(
            continuation.output.finish(stop_id), [stop_id] if self._want_ids and stop_id is not None else []
        )
        continuation.finished = _finished(index, outcome, continuation.output.stop_string)
        self.outcomes.append(outcome)
        self._end(continuation)

    def failed(self, error: RequestError) -> None:
        """See ``Listener``. Text that was held back is let go: the client keeps what was generated."""
        self.error = error
        for continuation in self._continuations:
            if not continuation.ended:
                continuation.add(continuation.output.finish(None), [])
                self._end(continuation)
        self._ready.set()

    # The writer's end.

    @property
    def ended(self) -> bool:
        """Whether the request is over; what is pending is then the last there is."""
        return self.error is not None or not self._running

    async def wait(self) -> None:
        """Returns once there is something to take, or the request is over."""
        await self._ready.wait()

    def take(self) -> list[pb.GenerateResponse]:
        """What to write now, in order; empty only if the request is over."""
        self._ready.clear()
        if self.ended:
            self._ready.set()
        responses = []
        if self._started_pending:
            self._started_pending = False
            responses.append(pb.GenerateResponse(started=self._started))
        for index, continuation in enumerate(self._continuations):
            for piece in continuation.pieces:
                delta = pb.Delta(index=index, text="".join(piece.texts), token_ids=piece.ids)
                responses.append(pb.GenerateResponse(delta=delta))
            continuation.pieces = []
            if continuation.finished is not None:
                responses.append(pb.GenerateResponse(finished=continuation.finished))
                continuation.finished = None
        return responses

    def _count(self) -> None:
        self.completion_tokens += 1
        self.last_token = self._clock()
        if self.first_token is None:
            self.first_token = self.last_token

    def _end(self, continuation: _Continuation) -> None:
        continuation.ended = True
        self._running -= 1
        self._ready.set()


def aborted_early(n: int) -> list[pb.GenerateResponse]:
    """The whole stream of a request that was aborted before the scheduler had it.

    Args:
        n: Continuations it would have had.
    """
    outcome = Outcome(
        reason=Reason.ABORTED,
        stop_token_id=None,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        queue=0.0,
        prefill=0.0,
        decode=0.0,
    )
    return [pb.GenerateResponse(finished=_finished(index, outcome, None)) for index in range(n)]


def _finished(index: int, outcome: Outcome, stop_string: str | None) -> pb.Finished:
    message = pb.Finished(index=index, reason=_REASONS[outcome.reason], usage=_usage(index, outcome))
    if outcome.reason is Reason.STOP:
        if stop_string is not None:
            message.stop_string = stop_string
        elif outcome.stop_token_id is not None:
            message.stop_token_id = outcome.stop_token_id
    return message


def _usage(index: int, outcome: Outcome) -> pb.Usage:
    first = index == 0
    return pb.Usage(
        prompt_tokens=outcome.prompt_tokens if first else 0,
        cached_tokens=outcome.cached_tokens if first else 0,
        completion_tokens=outcome.completion_tokens,
        queue=_duration(outcome.queue),
        prefill=_duration(outcome.prefill),
        decode=_duration(outcome.decode),
    )


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
    return duration
