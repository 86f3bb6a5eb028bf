"""How calls end: abort, cancel, deadline, refusals; and that none of it touches a neighbour. Scripted tokens."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.e2e.wire import Client, Collected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.process import Server

ABORTED = 3
SCRIPT = {
    "step_ms": 2,
    "requests": {
        "endless*": {"tokens": list(b"abc"), "loop": True},
        "apart*": {"tokens": [[97], [98] * 4, [99] * 100_000]},
        "nan": {"tokens": [97], "loop": True, "nan_at": 3},
        "fail": {"tokens": [97], "loop": True, "fail_at": 3},
    },
}
NARROW = (
    *("--max-running", "1", "--max-waiting", "1", "--page-size", "4", "--pool-tokens", "64"),
    *("--context", "256", "--max-message-mb", "1"),
)


@pytest.fixture(scope="module")
def server(start_shared: Callable[..., Server]) -> Server:
    return start_shared("--pool-tokens", "200000", "--context", "100000", script=SCRIPT)


@pytest.fixture(scope="module")
def narrow(start_shared: Callable[..., Server]) -> Server:
    """Room for one short request at a time."""
    return start_shared(*NARROW, script=SCRIPT)


@pytest.fixture
def other_client(server: Server) -> Iterator[Client]:
    """A client on a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(server.target, options=options) as channel:
        yield Client(server.contract, channel)


def begin(server: Server, request_id: str, until: str = "delta", **fields: Any) -> tuple[Any, Collected]:
    """Starts a stream without a deadline, and reads it up to its first event of a kind."""
    call = server.client.Generate(server.request(request_id, text="go", **fields))
    return call, read(call, until)


def read(call: Any, until: str) -> Collected:
    """Reads a stream up to its next event of a kind."""
    collected = Collected([])
    for response in call:
        collected.add(response)
        if response.WhichOneof("event") == until:
            break
    return collected


def wait_for(server: Server, **expected: int) -> None:
    """Asks for the counts until they are as expected, as they must be within seconds."""
    deadline = time.monotonic() + 10
    while any(getattr(server.stats(), name) != value for name, value in expected.items()):
        assert time.monotonic() < deadline, (expected, server.stats())


def assert_idle(server: Server) -> None:
    wait_for(server, running=0, waiting=0, pages_protected=0, pages_private=0, pages_retiring=0)
    stats = server.stats()
    assert stats.pages_free + stats.pages_evictable == stats.pages_total


def refusal(call: Any) -> Any:
    """The error that a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value


def details(error: Any) -> list[str]:
    """The types of a refusal's rich details."""
    status = rpc_status.from_call(error)
    return [] if status is None else [detail.TypeName() for detail in status.details]


@pytest.mark.timeout(30)
def test_aborting_anothers_stream_without_a_deadline_ends_it_within_a_second(
    server: Server, other_client: Client
) -> None:
    call, _ = begin(server, "endless-1")
    began = time.monotonic()
    assert other_client.Abort(server.contract.AbortRequest(request_id="endless-1")).found
    rest = Collected(call)
    assert time.monotonic() - began < 1
    assert rest.finished[0].reason == ABORTED
    assert call.code() is grpc.StatusCode.OK
    assert not other_client.Abort(server.contract.AbortRequest(request_id="endless-1")).found
    assert_idle(server)


def test_an_abort_ends_the_indices_that_still_run_and_no_others(server: Server) -> None:
    call = server.client.Generate(server.request("apart-1", text="go", sampling={"n": 3}))
    collected = Collected([])
    while len(collected.finished) < 2:
        collected.add(next(call))
    assert server.client.Abort(server.contract.AbortRequest(request_id="apart-1")).found
    for response in call:
        collected.add(response)
    assert [collected.finished[index].reason for index in range(3)] == [1, 1, ABORTED]
    assert_idle(server)


def test_cancelling_a_request_of_three_indices_stops_them_all(server: Server) -> None:
    call, _ = begin(server, "apart-2", until="finished", sampling={"n": 3})
    call.cancel()
    assert_idle(server)


def test_an_unknown_id_is_not_found_and_an_empty_one_is_invalid(server: Server) -> None:
    assert not server.client.Abort(server.contract.AbortRequest(request_id="never")).found
    with pytest.raises(grpc.RpcError) as caught:
        server.client.Abort(server.contract.AbortRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "request_id" in caught.value.details()


def test_a_client_that_cancels_frees_what_it_held_and_its_id(server: Server) -> None:
    for _ in range(3):
        call, collected = begin(server, "endless-2")
        assert collected.started.request_id == "endless-2"
        call.cancel()
        wait_for(server, running=0)
    assert_idle(server)
    assert [line["status"] for line in server.events("generate") if line["request_id"] == "endless-2"] == [
        "CANCELLED"
    ] * 3


def test_a_deadline_stops_the_work(server: Server) -> None:
    call = server.client.Generate(server.request("endless-3", text="go"), timeout=0.2)
    assert refusal(call).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert_idle(server)


def test_a_live_id_is_refused_and_an_ended_one_may_be_used_at_once(server: Server) -> None:
    call, _ = begin(server, "endless-4")
    again = refusal(server.client.Generate(server.request("endless-4", text="go"), timeout=10))
    assert again.code() is grpc.StatusCode.ALREADY_EXISTS
    assert call.is_active()
    call.cancel()
    wait_for(server, running=0)
    for _ in range(20):
        responses = server.client.Generate(server.request("endless-4", text="go", stop={"max_tokens": 1}), timeout=10)
        assert Collected(responses).finished[0].reason == 2


def test_the_server_names_a_request_that_has_no_name(server: Server) -> None:
    call, collected = begin(server, "", until="started", stop={"max_tokens": 1})
    list(call)
    assert len(collected.started.request_id) == 32


@pytest.mark.parametrize("request_id", ["nan", "fail"])
def test_a_request_whose_numbers_fail_ends_alone(server: Server, request_id: str) -> None:
    neighbour, _ = begin(server, "endless-5")
    call, before = begin(server, request_id)
    error = refusal(call)
    assert error.code() is grpc.StatusCode.INTERNAL
    if request_id == "fail":
        assert "the script fails 'fail' at position 3, in step" in error.details()
    assert before.started is not None
    if request_id == "nan":
        assert read(neighbour, "delta").deltas
    neighbour.cancel()
    assert_idle(server)


@pytest.mark.timeout(60)
def test_many_that_cancel_on_the_first_message_leave_a_neighbour_whole(server: Server) -> None:
    neighbour = server.client.Generate(server.request("endless-6", text="go", stop={"max_tokens": 600}))
    with ThreadPoolExecutor(8) as threads:
        for call, _ in threads.map(lambda i: begin(server, f"endless-7-{i}", until="started"), range(200)):
            call.cancel()
    assert Collected(neighbour).text() == "abc" * 200
    assert_idle(server)


def test_a_full_queue_asks_to_retry_and_an_abort_reaches_who_waits(narrow: Server) -> None:
    running, _ = begin(narrow, "endless-1")
    waiting = narrow.client.Generate(narrow.request("endless-2", text="go"))
    wait_for(narrow, running=1, waiting=1)
    error = refusal(narrow.client.Generate(narrow.request("endless-3", text="go"), timeout=10))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == ("the queue is full: 1 sequence waits, at most 1 may (--max-waiting); try again later")
    assert details(error) == ["google.rpc.RetryInfo"]
    retry = error_details_pb2.RetryInfo()
    assert rpc_status.from_call(error).details[0].Unpack(retry)
    assert retry.retry_delay.ToSeconds() >= 1
    assert narrow.client.Abort(narrow.contract.AbortRequest(request_id="endless-2")).found
    ended = Collected(waiting)
    assert ended.started is None
    assert ended.finished[0].reason == ABORTED
    assert ended.finished[0].usage.prompt_tokens == 2
    running.cancel()
    assert_idle(narrow)


def test_a_prompt_larger_than_the_pool_fails_at_once_and_blocks_nobody(narrow: Server) -> None:
    error = refusal(narrow.client.Generate(narrow.request(text="p" * 100), timeout=10))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    after = narrow.client.Generate(narrow.request("endless-8", text="p" * 8, stop={"max_tokens": 2}), timeout=10)
    assert Collected(after).text() == "ab"


def test_a_request_that_outgrows_the_pool_keeps_its_tokens_and_may_not_be_retried(narrow: Server) -> None:
    call = narrow.client.Generate(narrow.request("endless-9", text="p" * 60, stop={"max_tokens": 100}), timeout=10)
    collected = Collected([])
    error = refusal(map(collected.add, call))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(error) == []
    assert collected.text() == "".join(itertools.islice(itertools.cycle("abc"), len(collected.text())))
    assert len(collected.text()) >= 4
    after = narrow.client.Generate(narrow.request("endless-8", text="p" * 8, stop={"max_tokens": 2}), timeout=10)
    assert Collected(after).text() == "ab"
    assert_idle(narrow)


def test_a_message_over_the_limit_is_refused_with_the_sizes(narrow: Server) -> None:
    error = refusal(narrow.client.Generate(narrow.request(text="p" * (2 << 20)), timeout=10))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()


def test_a_slow_reader_gets_every_token_in_order_and_delays_nobody(server: Server) -> None:
    slow = server.client.Generate(server.request("endless-slow", text="go", stop={"max_tokens": 900}))
    first = next(slow)
    began = time.monotonic()
    quick = Collected(server.client.Generate(server.request("endless-quick", text="go", stop={"max_tokens": 30})))
    assert quick.text() == "abc" * 10
    assert time.monotonic() - began < 5
    assert Collected(itertools.chain([first], slow)).text() == "abc" * 300
    assert_idle(server)
