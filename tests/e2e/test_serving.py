"""How a server starts, refuses to start, drains and ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.e2e.process import NOT_SERVING, RADIXD, SERVING, assert_one_line, radixd
from tests.e2e.wire import Collected

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.process import Server

SCRIPT = {
    "step_ms": 2,
    "requests": {"endless": {"tokens": [97], "loop": True}, "hang": {"tokens": [97], "loop": True, "hang_at": 2}},
}
SERVICES = ("GenerateService", "TextService", "ModelService", "CacheService")


def begin(server: Server, request_id: str, **fields: Any) -> Any:
    """A stream that has started."""
    call = server.client.Generate(server.request(request_id, text="go", **fields))
    assert next(call).WhichOneof("event") == "started"
    return call


@pytest.mark.timeout(60)
def test_a_drain_lets_the_running_stream_finish_and_refuses_new_ones(start: Callable[..., Server]) -> None:
    server = start(script=SCRIPT)
    watch = server.health.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == SERVING
    cancelled = begin(server, "endless")
    cancelled.cancel()
    running = begin(server, "", stop={"max_tokens": 300})
    server.send(signal.SIGTERM)
    assert next(watch).status == NOT_SERVING
    assert [server.status(f"radixd.v1.{name}") for name in SERVICES] == [NOT_SERVING] * 4
    with pytest.raises(grpc.RpcError) as caught:
        next(server.client.Generate(server.request(text="go"), timeout=10))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "draining" in caught.value.details()
    assert Collected(running).finished[0].usage.completion_tokens == 300
    (draining,) = server.events("draining")
    assert (draining["signal"], draining["streams"]) == ("SIGTERM", 1)
    assert "second signal" in draining["hint"]
    began = time.monotonic()
    server.finish()
    assert time.monotonic() - began < 10
    events = [json.loads(line) for line in server.log().splitlines()]
    assert [event["event"] for event in events][-2:] == ["idle", "stopped"]
    assert all(list(event)[:3] == ["timestamp", "level", "event"] for event in events)


def test_streams_that_outlast_the_grace_end_with_a_status(start: Callable[..., Server]) -> None:
    server = start("--grace", "0.3", script=SCRIPT)
    call = begin(server, "endless")
    server.send(signal.SIGINT)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    server.finish()


def test_a_second_signal_ends_at_once(start: Callable[..., Server]) -> None:
    server = start(script=SCRIPT)
    watch = server.health.Watch(health_pb2.HealthCheckRequest())
    begin(server, "endless")
    next(watch)
    server.send(signal.SIGTERM)
    assert next(watch).status == NOT_SERVING
    server.send(signal.SIGTERM)
    assert server.wait(timeout=5) == 128 + signal.SIGTERM


def test_a_hanging_engine_cannot_keep_the_process(start: Callable[..., Server]) -> None:
    server = start("--grace", "0.1", script=SCRIPT)
    call = begin(server, "hang")
    server.send(signal.SIGTERM)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.wait() == 1
    assert server.events("engine_hangs")


def test_a_log_that_nobody_reads_any_more_costs_nothing_but_its_lines(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text("{}")
    with subprocess.Popen(
        [RADIXD, "serve", "--port", "0", "--engine", f"scripted:{script}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stderr.readline()
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_flags_win_over_the_environment_and_the_environment_over_the_file(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    config = tmp_path / "radixd.toml"
    config.write_text('page-size = 4\npool_tokens = 800\ncontext = 128\nno-overlap = true\nhost = "127.0.0.1"\n')
    environment = {"RADIXD_CONFIG": str(config), "RADIXD_PAGE_SIZE": "8", "RADIXD_CONTEXT": "64"}
    server = start("--context", "32", "--cache", "naive", script=SCRIPT, environment=environment)
    model = server.client.GetModel(server.contract.GetModelRequest())
    assert (model.page_size, model.pool_tokens, model.context_length) == (8, 800, 32)
    assert server.first_line.startswith(f"radixd serves scripted on {server.target};")
    assert f"radixd generate --target {server.target}" in server.first_line


def test_the_naive_cache_serves_the_same_text_without_hits(start: Callable[..., Server]) -> None:
    server = start("--cache", "naive", script=SCRIPT)
    request = server.request(text="p" * 100, stop={"max_tokens": 5}, sampling={"temperature": 0})
    first, second = (Collected(server.client.Generate(request)) for _ in range(2))
    assert first.text() == second.text()
    assert second.started.cached_tokens == 0


def test_a_port_in_use_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = radixd("serve", "--port", str(port))
    assert result.returncode == 1
    assert_one_line(result.stderr, f"cannot listen on 127.0.0.1:{port}", "in use")


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    result = radixd("serve", "--port", "0", "--model", str(tmp_path / "none.gguf"))
    assert result.returncode == 1
    assert_one_line(result.stderr, "none.gguf")


def test_a_bad_script_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"requests": {"a": {"tokens": [999]}}}')
    result = radixd("serve", "--port", "0", "--engine", f"scripted:{script}")
    assert result.returncode == 1
    assert_one_line(result.stderr, "script.json", "999")
