"""Real servers, shared where a test does not end them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.process import Server
from tests.e2e.wire import Contract

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def contract(tmp_path_factory: pytest.TempPathFactory) -> Contract:
    return Contract(tmp_path_factory.mktemp("protos"))


def _starting(contract: Contract, folder: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*arguments: str, script: dict[str, Any] | None = None, **kwargs: Any) -> Server:
        number = len(started)
        if script is not None:
            file = folder / f"script{number}.json"
            file.write_text(json.dumps(script))
            arguments = ("--engine", f"scripted:{file}", *arguments)
        started.append(Server(contract, folder / f"server{number}.log", *arguments, **kwargs))
        return started[-1]

    yield start
    try:
        for server in started:
            if server.process.poll() is None:
                server.stop()
    finally:
        for server in started:
            server.kill()


@pytest.fixture
def start(contract: Contract, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers for one test: ``start(*flags, script=...)``; those still running are stopped after it."""
    yield from _starting(contract, tmp_path)


@pytest.fixture(scope="module")
def start_shared(contract: Contract, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """As ``start``, for a module's servers."""
    yield from _starting(contract, tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="session")
def model(contract: Contract, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the default model, with a small pool and float32 for comparable runs."""
    servers = _starting(contract, tmp_path_factory.mktemp("model"))
    start = next(servers)
    yield start("--context", "1024", "--pool-tokens", "8192", "--chunk-tokens", "64")
    for _ in servers:
        pass
