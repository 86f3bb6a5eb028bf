"""One log line for each Generate call: what was asked, what it cost, how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from scheduler.request import Reason
from service.status import EXPECTED, MAX_MESSAGE_BYTES, status_of
from service.validation import MAX_REQUEST_ID_BYTES

if TYPE_CHECKING:
    import structlog.typing

    from service.stream import TokenStream


@dataclass(slots=True)
class AccessEntry:
    """Gathers what the line says, while the call runs.

    Attributes:
        request_id: The caller's, or the server's.
        arrived: When the call began, in the monotonic clock's seconds.
        submitted: When its prompt was ready and the scheduler got it; None is not yet.
        status: The gRPC status it ended with, by name.
        error: Why it was refused or failed.
        stream: The request's stream, once it was submitted.
        aborted: Abort ended it before it was submitted.
    """

    request_id: str
    arrived: float
    submitted: float | None = None
    status: str = "OK"
    error: str | None = None
    stream: TokenStream | None = None
    aborted: bool = False

    def fail(self, error: BaseException, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The call ends with ``error``, or because its client went away or its deadline passed."""
        if isinstance(error, asyncio.CancelledError | grpc.aio.BaseError):
            # grpc.aio cancels a handler without a reason; a deadline shows only in what is left of it.
            remaining: float | None = context.time_remaining()
            expired = remaining is not None and remaining <= 0
            self.status = "DEADLINE_EXCEEDED" if expired else "CANCELLED"
        elif isinstance(error, Exception):
            status = status_of(error)
            self.status = status.code.name
            # An unexpected error's own text is not for the client, but it is for the log.
            self.error = status.details if isinstance(error, EXPECTED) else repr(error)[:MAX_MESSAGE_BYTES]
        else:
            self.status = "UNKNOWN"
            self.error = type(error).__name__

    def write(self, log: structlog.typing.FilteringBoundLogger) -> None:
        """Writes the line.

        Times are seconds: ``prepare`` from the call's begin until its prompt is tokenized, ``queue`` from then to its
        admission, as in Usage; ``ttft`` from the call's begin to the first token; ``tpot`` for each token after that.
        """
        fields: dict[str, Any] = {"request_id": self.request_id[:MAX_REQUEST_ID_BYTES], "status": self.status}
        if self.error is not None:
            fields["error"] = self.error
        if self.aborted:
            fields["reasons"] = [Reason.ABORTED.name]
        if self.stream is not None:
            fields |= self._measured(self.stream)
        log.info("generate", **fields)

    def _measured(self, stream: TokenStream) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "reasons": [outcome.reason.name for outcome in stream.outcomes],
            "prompt_tokens": stream.prompt_tokens,
            "cached_tokens": stream.cached_tokens,
            "completion_tokens": stream.completion_tokens,
        }
        if self.submitted is not None:
            fields["prepare"] = round(self.submitted - self.arrived, 6)
            if stream.admitted is not None:
                fields["queue"] = round(stream.admitted - self.submitted, 6)
        if stream.first_token is not None and stream.last_token is not None:
            fields["ttft"] = round(stream.first_token - self.arrived, 6)
            # Continuations run side by side: each has had about this many tokens after its first.
            steps = stream.completion_tokens / stream.n - 1
            if steps > 0:
                fields["tpot"] = round((stream.last_token - stream.first_token) / steps, 6)
        return fields
