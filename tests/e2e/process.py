"""A real ``radixd serve`` in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.wire import Client, Contract

if TYPE_CHECKING:
    from collections.abc import Mapping

RADIXD = Path(sys.executable).parent / "radixd"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def radixd(*arguments: str, timeout: float = 60, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    return subprocess.run([RADIXD, *arguments], capture_output=True, text=True, timeout=timeout, check=False, **kwargs)


def assert_one_line(error: str, *expected: str) -> None:
    """A failed start is told in one line, without a traceback."""
    assert len(error.strip().splitlines()) == 1, error
    assert error.startswith("radixd: ")
    for part in expected:
        assert part in error


class Server:
    """A running server.

    Args:
        contract: What its client speaks.
        log: Where its stderr goes.
        arguments: Of ``radixd serve``; the port is chosen by the system.
        environment: Added to this process's own.
    """

    def __init__(
        self, contract: Contract, log: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.contract = contract
        self._log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [RADIXD, "serve", "--port", "0", *arguments],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | dict(environment or {}),
            )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        found = re.search(r" on (127\.0\.0\.1:\d+);", self.first_line)
        if found is None:
            self.kill()
            raise AssertionError(f"the server did not start: {self.first_line}{log.read_text()}")
        self.target = found[1]
        self.channel = grpc.insecure_channel(self.target, options=[("grpc.max_send_message_length", -1)])
        self.client = Client(contract, self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def request(self, request_id: str = "", **fields: Any) -> Any:
        """A GenerateRequest."""
        return self.contract.GenerateRequest(request_id=request_id, **fields)

    def status(self, service: str = "") -> int:
        """What the health service says."""
        return self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status

    def stats(self) -> Any:
        """The server's counts."""
        return self.client.GetStats(self.contract.GetStatsRequest(), timeout=10)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log lines of one event so far."""
        lines = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def log(self) -> str:
        """Everything it wrote to stderr so far."""
        return self._log.read_text()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def wait(self, timeout: float = 30) -> int:
        """Waits for the process to end; returns its exit code."""
        code = self.process.wait(timeout)
        self.channel.close()
        return code

    def stop(self) -> None:
        """Ends it as a supervisor does, and checks that nothing was lost on the way."""
        self.send(signal.SIGTERM)
        self.finish()

    def finish(self) -> None:
        """Waits for a server that was told to end, and checks that nothing was lost on the way."""
        assert self.wait() == 0, self.log()
        (idle,) = self.events("idle")
        assert idle["pages_free"] + idle["pages_evictable"] == idle["pages_total"]
        assert idle["running"] == idle["waiting"] == idle["pages_protected"] == 0
        assert "Traceback" not in self.log()
        assert not self.events("handler_failed")

    def kill(self) -> None:
        """Ends it whatever happens."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
