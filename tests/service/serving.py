"""The whole service in this process: real scheduler, cache, scripted engine and transport."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from radixd.v1 import generate_pb2 as pb
from radixd.v1 import generate_pb2_grpc

from engine.base import EngineError, StepResult
from engine.script import parse_script
from engine.scripted import ScriptedEngine
from kvcache import RadixCache
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from service.model import ServedModel
from service.replica import Replica
from service.server import Server
from service.settings import Settings
from service.text import PieceTokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SCRIPT = {"requests": {"endless*": {"tokens": [97], "loop": True, "step_ms": 1}}}


class GatedTokenizer(PieceTokenizer):
    """Reads "slow" prompts only once ``gate`` is set; tells in ``begun`` when it came to one."""

    __slots__ = ("begun", "gate")

    def __init__(self, pieces: tuple[bytes, ...]) -> None:
        super().__init__(pieces)
        self.gate = threading.Event()
        self.begun = threading.Event()

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """As ``PieceTokenizer.encode``."""
        if text.startswith("slow"):
            self.begun.set()
            self.gate.wait()
        return super().encode(text, **kwargs)


class MortalEngine(ScriptedEngine):
    """A scripted engine that a test can take the device from."""

    dead = False

    def sample(self, masks: None = None) -> Future[StepResult]:
        """As ``ScriptedEngine.sample``, while it lives."""
        if not self.dead:
            return super().sample(masks)
        failed: Future[StepResult] = Future()
        failed.set_exception(EngineError("the device is gone", sticky=True))
        return failed


class Service:
    """A server in this process, and a stub for it.

    Attributes:
        lines: What was logged.
        code: The exit code, once it ended.
    """

    def __init__(self, settings: Settings) -> None:
        script = parse_script(SCRIPT)
        self.engine = MortalEngine(script, page_size=16, pool_tokens=4096, max_rows=8)
        self.tokenizer = GatedTokenizer(script.pieces)
        self.scheduler = Scheduler(self.engine, RadixCache(16), SchedulerSettings(max_running=8))
        model = ServedModel(self.engine.spec, (), self.tokenizer, None, 16, 4096)
        self.lines: list[dict[str, Any]] = []
        self._heard = asyncio.Event()
        log = structlog.wrap_logger(
            None, processors=[self._hear], wrapper_class=structlog.make_filtering_bound_logger(0)
        )
        self.server = Server(Replica(self.engine, self.scheduler, model), settings, log)
        self.stub: Any = None
        self.channel: Any = None
        self.code: int | None = None

    def generate(self, request_id: str, text: str = "go", **fields: Any) -> Any:
        """Starts a stream."""
        return self.stub.Generate(pb.GenerateRequest(request_id=request_id, text=text, **fields))

    async def abort(self, request_id: str) -> bool:
        """Aborts by id; returns whether it was found."""
        return bool((await self.stub.Abort(pb.AbortRequest(request_id=request_id))).found)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Every line of one event so far."""
        return [line for line in self.lines if line["event"] == event]

    async def first_logged(self, event: str) -> dict[str, Any]:
        """The first line of one event, once there is one."""
        while not self.logged(event):
            self._heard.clear()
            await self._heard.wait()
        return self.logged(event)[0]

    def _hear(self, logger: Any, method: str, line: dict[str, Any]) -> dict[str, Any]:
        del logger, method
        self.lines.append(line)
        self._heard.set()
        raise structlog.DropEvent


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Service]:
    """Runs a service for one test, then drains it."""
    service = Service(Settings(port=0, **({"grace": 1.0} | settings)))
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    life = asyncio.create_task(service.server.serve(ready.set_result))
    port = await ready
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        service.channel = channel
        service.stub = generate_pb2_grpc.GenerateServiceStub(channel)
        yield service
        service.tokenizer.gate.set()
        service.server.drain()
        service.code = await life
