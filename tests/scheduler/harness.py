"""A scheduler over the scripted engine, whose steps run only when a test turns the crank."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.base import EngineError
from engine.script import parse_script
from engine.scripted import ScriptedEngine
from kvcache import NaiveCache, RadixCache
from scheduler.request import Reason, Request, Sampling
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler.errors import RequestError
    from scheduler.request import Outcome


class Crank:
    """Runs an engine's launches on the calling thread, when told to; by itself at once where ``auto``."""

    def __init__(self, *, auto: bool = True) -> None:
        self.auto = auto
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closed = False

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if self._closed:
            future.set_exception(EngineError("closed", sticky=True))
            return future
        self._queue.append((future, function))
        if self.auto:
            self.turn()
        return future

    def turn(self) -> None:
        """Runs everything that is queued."""
        while self._queue:
            future, function = self._queue.popleft()
            try:
                future.set_result(function())
            except EngineError as error:
                future.set_exception(error)

    def close(self) -> None:
        self._closed = True
        while self._queue:
            self._queue.popleft()[0].set_exception(EngineError("closed", sticky=True))


@dataclass
class Recorder:
    """A listener that checks the order of what it hears."""

    stop_after: int | None = None
    cached: int | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    error: RequestError | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    n: int = 1
    silent: bool = False

    def started(self, cached_tokens: int) -> None:
        assert self.cached is None, "started twice"
        assert not self.tokens
        assert not self.silent
        self.cached = cached_tokens

    def token(self, index: int, token_id: int) -> bool:
        assert self.cached is not None, "a token before started"
        assert index not in self.outcomes, "a token after finished"
        assert self.error is None
        assert not self.silent, "a token after cancel"
        self.tokens.setdefault(index, []).append(token_id)
        return len(self.tokens[index]) == self.stop_after

    def finished(self, index: int, outcome: Outcome) -> None:
        assert index not in self.outcomes, "finished twice"
        assert self.error is None
        assert not self.silent
        self.outcomes[index] = outcome
        if len(self.outcomes) == self.n:
            self.done.set()

    def failed(self, error: RequestError) -> None:
        assert self.error is None
        assert not self.done.is_set()
        assert not self.silent
        self.error = error
        self.done.set()

    @property
    def output(self) -> list[int]:
        """Index 0's tokens."""
        return self.tokens.get(0, [])

    @property
    def reason(self) -> Reason:
        return self.outcomes[0].reason


class Harness:
    """One scheduler, running; leaving the context proves that it is idle and that every page is accounted for."""

    def __init__(
        self,
        script: dict[str, Any] | None = None,
        *,
        page_size: int = 1,
        pool_tokens: int = 4096,
        context: int = 4096,
        cache: str = "radix",
        crank: Crank | None = None,
        check: bool = True,
        **settings: Any,
    ) -> None:
        self.crank = crank or Crank()
        self.events: list[tuple[str, int]] = []
        self.engine = ScriptedEngine(
            parse_script(script or {}),
            page_size=page_size,
            pool_tokens=pool_tokens,
            max_rows=settings.get("max_running", 64),
            context=context,
            launches=self.crank,
        )
        tree = RadixCache(page_size) if cache == "radix" else NaiveCache(page_size)
        self.scheduler = Scheduler(self.engine, tree, SchedulerSettings(**settings), trace=self._trace)
        self.check = check
        self.failure: BaseException | None = None

    def _trace(self, event: str, step: int) -> None:
        self.events.append((event, step))
        if self.check:
            self.scheduler.ledger.check_integrity()

    async def __aenter__(self) -> Harness:
        self._task = asyncio.create_task(self.scheduler.run())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.scheduler.stop()
        self.crank.turn()
        self.crank.auto = True
        try:
            await self._task
        except EngineError as error:
            self.failure = error
        if kind is None:
            self.assert_idle()

    def assert_idle(self) -> None:
        self.scheduler.ledger.check_integrity()
        stats = self.scheduler.stats()
        assert stats.idle, stats
        assert stats.pages_free + stats.pages_evictable == stats.pages_total

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        stop_after: int | None = None,
        n: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
        **fields: Any,
    ) -> Recorder:
        recorder = Recorder(stop_after=stop_after, n=n)
        fields.setdefault("stop_ids", self.engine.script.eos_ids)
        self.scheduler.submit(
            Request(
                request_id=request_id,
                prompt_ids=np.array(prompt, dtype=np.int32),
                max_tokens=max_tokens,
                listener=recorder,
                sampling=Sampling(temperature=temperature, seed=seed),
                n=n,
                **fields,
            )
        )
        return recorder

    async def run(self, request_id: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Recorder:
        """Submits and waits for the end."""
        recorder = self.submit(request_id, prompt, max_tokens, **fields)
        await recorder.done.wait()
        return recorder

    async def settle(self, turns: int = 20) -> None:
        """Lets every task that can go on do so."""
        for _ in range(turns):
            await asyncio.sleep(0)

    async def idle(self) -> None:
        await self.scheduler.wait_idle()
        self.assert_idle()


async def solo(
    prompt: list[int], max_tokens: int = 8, script: dict[str, Any] | None = None, **fields: Any
) -> list[int]:
    """What a request generates alone, in a large pool, without overlap or cache."""
    async with Harness(script, cache="naive", overlap=False) as harness:
        return (await harness.run("solo", prompt, max_tokens, **fields)).output
