"""The one place where typed errors become gRPC statuses.

A status has a code, a message that a person can act on, and google.rpc details that a program can: BadRequest for
fields, RetryInfo where the same call may succeed later. Both travel in trailing metadata, of which transports take
8 KiB in all; so texts and the number of violations are cut to stay under that even percent-encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from scheduler import errors as scheduling
from service import errors, text

if TYPE_CHECKING:
    from google.protobuf.message import Message

MAX_MESSAGE_BYTES = 512
MAX_DESCRIPTION_BYTES = 128
MAX_VIOLATIONS = 16

_CODES: dict[type[Exception], grpc.StatusCode] = {
    errors.InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotServedError: grpc.StatusCode.UNIMPLEMENTED,
    errors.UnknownModelError: grpc.StatusCode.NOT_FOUND,
    text.NoChatTemplateError: grpc.StatusCode.FAILED_PRECONDITION,
    text.TextError: grpc.StatusCode.INVALID_ARGUMENT,
    scheduling.DuplicateRequestError: grpc.StatusCode.ALREADY_EXISTS,
    scheduling.QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    scheduling.PromptTooLargeError: grpc.StatusCode.FAILED_PRECONDITION,
    scheduling.OutgrownError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    scheduling.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    scheduling.NotFiniteError: grpc.StatusCode.INTERNAL,
    scheduling.StepFailedError: grpc.StatusCode.INTERNAL,
}

EXPECTED = (errors.ServiceError, scheduling.RequestError, text.TextError)
"""What a servicer may raise on purpose; anything else is a fault of this code."""


def status_of(error: Exception) -> grpc.Status:
    """The status that ends a call which failed with ``error``.

    An unexpected error becomes INTERNAL and says nothing of what it was: its traceback is for the log.
    """
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), None)
    if code is None:
        return _rich(grpc.StatusCode.INTERNAL, "internal error; the server's log has the cause", [])
    return _rich(code, str(error), _details(error))


async def end_with(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    """Ends a call with the status of ``error``; does not return."""
    status = status_of(error)
    await context.abort(status.code, status.details, tuple(status.trailing_metadata))


def _details(error: Exception) -> list[Message]:
    if isinstance(error, errors.InvalidRequestError):
        return [_bad_request(error.violations[:MAX_VIOLATIONS])]
    if isinstance(error, errors.NotServedError):
        return [_bad_request([errors.Violation(error.field, "not served by this version")])]
    if isinstance(error, scheduling.QueueFullError):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]
    return []


def _bad_request(violations: list[errors.Violation] | tuple[errors.Violation, ...]) -> error_details_pb2.BadRequest:
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(
                field=violation.field, description=_cut(violation.description, MAX_DESCRIPTION_BYTES)
            )
            for violation in violations
        ]
    )


def _rich(code: grpc.StatusCode, message: str, details: list[Message]) -> grpc.Status:
    message = _cut(message, MAX_MESSAGE_BYTES)
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    number: int = code.value[0]
    return rpc_status.to_status(status_pb2.Status(code=number, message=message, details=packed))


def _cut(text: str, limit: int) -> str:
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= limit else encoded[: limit - 3].decode(errors="ignore") + "..."
