"""Why a request ends without output. Each is translated to a gRPC status in one place, in the service."""

from __future__ import annotations


class RequestError(Exception):
    """A request was refused or ended; the message is for its client."""


class DuplicateRequestError(RequestError):
    """A live request already has this id."""


class QueueFullError(RequestError):
    """Too much is waiting; the same request may be accepted later.

    Args:
        message: For the client.
        retry_after: Seconds after which a retry is sensible.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PromptTooLargeError(RequestError):
    """The prompt needs more pages than the whole pool has: it can never be admitted."""


class OutgrownError(RequestError):
    """The request, alone, needs more pages than the whole pool has; it keeps the tokens it got so far."""


class UnavailableError(RequestError):
    """This replica takes no requests, or no longer: it drains, or its engine is down."""


class NotFiniteError(RequestError):
    """The model's numbers for this request were not finite. Nothing of it stays in the cache."""


class StepFailedError(RequestError):
    """The engine failed in a step that this request was part of."""
