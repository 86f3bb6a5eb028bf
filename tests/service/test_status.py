from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from scheduler import errors as scheduling
from service import errors
from service.status import status_of
from service.text import NoChatTemplateError, TemplateError, UnencodableTextError

DETAILS_KEY = "grpc-status-details-bin"
HEADER_BYTES = 8192


def rich(status: grpc.Status) -> status_pb2.Status:
    (value,) = (value for key, value in status.trailing_metadata if key == DETAILS_KEY)
    return status_pb2.Status.FromString(value)


@pytest.mark.parametrize("kind", scheduling.RequestError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_error_of_the_scheduler_has_a_code_of_its_own(kind: type[scheduling.RequestError]) -> None:
    error = scheduling.QueueFullError("full", 1.0) if kind is scheduling.QueueFullError else kind("why")
    status = status_of(error)
    assert status.details == str(error)
    internal = kind in (scheduling.NotFiniteError, scheduling.StepFailedError)
    assert (status.code is grpc.StatusCode.INTERNAL) is internal


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequestError.of("text", "must not be empty"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.NotServedError("constraint"), grpc.StatusCode.UNIMPLEMENTED),
        (errors.UnknownModelError("other", ("smollm2",)), grpc.StatusCode.NOT_FOUND),
        (NoChatTemplateError(), grpc.StatusCode.FAILED_PRECONDITION),
        (TemplateError("refused"), grpc.StatusCode.INVALID_ARGUMENT),
        (UnencodableTextError(3, "why"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_the_services_errors_have_their_codes(error: Exception, code: grpc.StatusCode) -> None:
    assert status_of(error).code is code
    assert str(error) in status_of(error).details


def test_a_bad_field_is_named_in_the_message_and_in_the_details() -> None:
    status = status_of(errors.InvalidRequestError.of("sampling.top_p", "must be above 0"))
    assert "sampling.top_p" in status.details
    bad = error_details_pb2.BadRequest()
    assert rich(status).details[0].Unpack(bad)
    assert bad.field_violations[0].field == "sampling.top_p"
    assert rich(status).message == status.details


def test_only_a_full_queue_says_when_to_retry() -> None:
    retry = error_details_pb2.RetryInfo()
    assert rich(status_of(scheduling.QueueFullError("full", 1.5))).details[0].Unpack(retry)
    assert retry.retry_delay.ToNanoseconds() == 1_500_000_000
    assert not rich(status_of(scheduling.OutgrownError("outgrown"))).details


def test_an_unexpected_error_keeps_its_text_to_itself() -> None:
    status = status_of(KeyError("secret"))
    assert status.code is grpc.StatusCode.INTERNAL
    assert "secret" not in status.details


def test_the_worst_refusal_still_fits_a_header() -> None:
    violations = [errors.Violation(f"stop.strings[{i}]", "é" * 300) for i in range(500)]
    status = status_of(errors.InvalidRequestError(violations))
    percent_encoded = 3 * len(status.details.encode())
    base64 = sum(4 * len(value) // 3 for _, value in status.trailing_metadata)
    assert percent_encoded + base64 < HEADER_BYTES
