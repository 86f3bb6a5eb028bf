from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from radixd.v1 import generate_pb2 as pb

from tests.service.serving import Service, serving

pytestmark = pytest.mark.timeout(30)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(call))
    return caught.value


async def read_to_the_error(call: Any) -> grpc.aio.AioRpcError:
    """Reads a stream that must end with an error."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the stream ended well")


async def begin_slow(service: Service, request_id: str, **fields: Any) -> Any:
    """A stream whose prompt is being tokenized, and will be until the gate opens."""
    call = service.generate(request_id, "slow", **fields)
    reading = asyncio.ensure_future(call.read())
    await asyncio.to_thread(service.tokenizer.begun.wait)
    service.tokenizer.begun.clear()
    return reading


async def test_abort_reaches_a_request_that_is_still_tokenized() -> None:
    async with serving() as service:
        reading = await begin_slow(service, "a", sampling={"n": 2})
        assert await service.abort("a")
        response = await reading
        assert response.finished.reason == pb.FINISH_REASON_ABORTED
        assert response.finished.usage.prompt_tokens == 0
        assert not await service.abort("a")
        (line,) = service.logged("generate")
        assert (line["status"], line["reasons"]) == ("OK", ["ABORTED"])
    assert service.scheduler.stats().forwarded_tokens == 0


async def test_an_id_is_taken_from_the_moment_its_prompt_is_tokenized() -> None:
    async with serving() as service:
        reading = await begin_slow(service, "a")
        assert (await refusal(service.generate("a"))).code() is grpc.StatusCode.ALREADY_EXISTS
        service.tokenizer.gate.set()
        assert (await reading).started.request_id == "a"


async def test_prompts_that_wait_to_be_tokenized_are_bounded_too() -> None:
    async with serving(max_waiting=1) as service:
        reading = await begin_slow(service, "a")
        error = await refusal(service.generate("b"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        full = "the queue is full: 1 prompt waits to be tokenized, at most 1 may (--max-waiting); try again later"
        assert error.details() == full
        (line,) = service.logged("generate")
        assert (line["request_id"], line["status"], line["error"]) == ("b", "RESOURCE_EXHAUSTED", full)
        service.tokenizer.gate.set()
        assert (await reading).HasField("started")


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_leaves_nothing() -> None:
    async with serving() as service:
        call = service.generate("a", "slow")
        reading = asyncio.ensure_future(call.read())
        await asyncio.to_thread(service.tokenizer.begun.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (await service.first_logged("generate"))["status"] == "CANCELLED"
        service.tokenizer.gate.set()
    assert service.scheduler.stats().forwarded_tokens == 0


async def test_a_deadline_is_logged_as_one() -> None:
    async with serving() as service:
        call = service.stub.Generate(pb.GenerateRequest(request_id="endless", text="go"), timeout=0.1)
        assert (await read_to_the_error(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        line = await service.first_logged("generate")
        assert line["status"] == "DEADLINE_EXCEEDED"
        assert line["completion_tokens"] > 0


async def test_a_handler_that_is_cancelled_from_within_still_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def cancelled(_: pb.GenerateRequest) -> None:
        raise asyncio.CancelledError

    async with serving() as service:
        monkeypatch.setattr("service.generate.StopStrings", cancelled)
        assert (await refusal(service.generate("a"))).code() is grpc.StatusCode.CANCELLED


async def test_an_unexpected_error_is_logged_and_says_nothing_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: pb.GenerateRequest) -> None:
        raise KeyError("secret")

    async with serving() as service:
        monkeypatch.setattr("service.generate.StopStrings", broken)
        error = await refusal(service.generate("a"))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in (error.details() or "")
        assert service.logged("handler_failed")
        (line,) = service.logged("generate")
        assert (line["status"], line["error"]) == ("INTERNAL", "KeyError('secret')")


async def test_the_engines_death_ends_streams_health_and_the_process() -> None:
    async with serving() as service:
        health = health_pb2_grpc.HealthStub(service.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        call = service.generate("endless")
        assert (await call.read()).HasField("started")
        service.engine.dead = True
        error = await read_to_the_error(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "engine" in (error.details() or "")
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert service.code == 1
    assert service.logged("engine_failed")
    assert (service.lines[-1]["event"], service.lines[-1]["code"]) == ("stopped", 1)


async def test_one_line_tells_what_a_call_cost() -> None:
    async with serving() as service:
        responses = [response async for response in service.generate("endless", stop={"max_tokens": 4})]
        assert responses[-1].finished.usage.completion_tokens == 4
    (line,) = service.logged("generate")
    assert {name: line[name] for name in ("request_id", "status", "reasons", "prompt_tokens", "completion_tokens")} == {
        "request_id": "endless",
        "status": "OK",
        "reasons": ["LENGTH"],
        "prompt_tokens": 2,
        "completion_tokens": 4,
    }
    assert 0 <= line["prepare"] + line["queue"] <= line["ttft"]
    assert line["tpot"] > 0
    assert "error" not in line
    assert service.code == 0


async def test_the_queue_time_of_the_log_is_that_of_usage_and_tokenizing_is_told_apart() -> None:
    async with serving() as service:
        call = service.generate("a", "slow", stop={"max_tokens": 1})
        reading = asyncio.ensure_future(call.read())
        await asyncio.to_thread(service.tokenizer.begun.wait)
        began = time.monotonic()
        await service.abort("another")
        held = time.monotonic() - began
        service.tokenizer.gate.set()
        assert (await reading).HasField("started")
        assert (await call.read()).HasField("delta")
        finished = (await call.read()).finished
    (line,) = service.logged("generate")
    assert line["prepare"] >= round(held, 6)
    assert line["queue"] == pytest.approx(finished.usage.queue.ToNanoseconds() / 1e9, abs=1e-3)


async def test_a_refused_request_is_logged_with_its_reason() -> None:
    async with serving() as service:
        error = await refusal(service.generate("a", "", sampling={"temperature": -1}))
    (line,) = service.logged("generate")
    assert line["error"] == error.details()
    assert "sampling.temperature" in line["error"]
    assert "prepare" not in line


async def test_an_unknown_services_health_is_refused_with_the_names_there_are() -> None:
    async with serving() as service:
        health = health_pb2_grpc.HealthStub(service.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="radixd.v1.Other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "no service 'radixd.v1.Other' here" in (caught.value.details() or "")
    assert "radixd.v1.GenerateService" in (caught.value.details() or "")


async def test_another_model_is_refused_by_the_name_that_was_asked_for() -> None:
    async with serving() as service:
        error = await refusal(service.generate("a", model="gpt-" + "9" * 1000))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "'gpt-999" in (error.details() or "")
    assert (error.details() or "").endswith("this replica serves scripted")


async def test_the_last_line_of_the_log_is_that_the_server_stopped() -> None:
    async with serving() as service:
        pass
    assert [line["event"] for line in service.lines] == ["idle", "stopped"]
    assert service.lines[-1]["code"] == 0
