"""The loop that keeps the device busy: admit, build, launch, collect, publish.

Step N+1 is built and launched while step N runs; only then is N collected. So the host works in the device's shadow,
at the price that N's tokens are unknown when N+1 is built: a sequence that N ends (by a stop id, a stop string, a
cancel) has one surplus token in N+1, which is dropped. Everything runs on one event loop, between awaits; only
``_collect`` awaits.

Memory pressure never fails a request that fits the pool alone: when pages run out, the loop lets what is in flight
land, and then preempts the newest of the lowest priority until the others fit. A preempted sequence keeps every token
it got and computes its KV again, from the cache where that still has it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine.base import EngineError
from kvcache.base import IntegrityError
from kvcache.ledger import Ledger
from scheduler.batch import Planned, SamplingTable, build, plan
from scheduler.errors import (
    DuplicateRequestError,
    NotFiniteError,
    OutgrownError,
    PromptTooLargeError,
    QueueFullError,
    RequestError,
    StepFailedError,
    UnavailableError,
)
from scheduler.request import Reason
from scheduler.sequence import Sequence, State
from scheduler.stats import Stats
from scheduler.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from engine.base import Engine, StepResult
    from kvcache.base import CacheStats, HotPrefix, PrefixCache
    from scheduler.request import Request
    from scheduler.settings import SchedulerSettings

TraceEvent = Literal["launch", "collect"]

_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A launched step: its plan, and where its result will be."""

    step: int
    planned: list[Planned]
    result: Future[StepResult]


class Scheduler:
    """Runs requests on one engine over one prefix cache. All methods belong to the loop that awaits ``run``.

    Args:
        engine: Runs the model.
        cache: Keeps prefixes, with the engine's page size.
        settings: Limits.
        clock: Seconds, monotonic; for the times in outcomes.
        trace: Told of each launch and collect, with the step's number.
    """

    def __init__(
        self,
        engine: Engine,
        cache: PrefixCache,
        settings: SchedulerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        trace: Callable[[TraceEvent, int], None] | None = None,
    ) -> None:
        if cache.page_size != engine.page_size:
            raise ValueError(f"the cache's pages hold {cache.page_size} tokens, the engine's {engine.page_size}")
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._trace = trace
        self._context = engine.spec.context_length
        max_rows = min(settings.max_running, engine.max_rows)
        self.ledger = Ledger(cache, engine.num_pages, max_rows, self._context)
        self._sampling = SamplingTable(max_rows)
        self._live: dict[str, list[Sequence]] = {}
        self._waiting = WaitingQueue()
        self._held = 0
        self._running: dict[Sequence, None] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._arrivals = 0
        self._step = 0
        self._steps_collected = 0
        self._hit_tokens = 0
        self._lookup_tokens = 0
        self._forwarded_tokens = 0
        self._preemptions = 0
        self._accepting = True
        self._stopping = False
        self._wakeup = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # What clients may do, between two steps.

    def submit(self, request: Request) -> None:
        """Queues a request; its listener hears the rest.

        Raises:
            UnavailableError: Draining or stopped.
            DuplicateRequestError: A live request has this id.
            PromptTooLargeError: The prompt alone is larger than the pool.
            QueueFullError: Too many wait.
            ValueError: The prompt is empty or leaves no room in the context.
        """
        if not self._accepting:
            raise UnavailableError("the server is draining and takes no new requests")
        if request.request_id in self._live:
            raise DuplicateRequestError(f"a live request has the id {request.request_id!r}")
        prompt_len = len(request.prompt_ids)
        if not 1 <= prompt_len < self._context:
            raise ValueError(f"a prompt of {prompt_len} tokens does not fit a context of {self._context}")
        if self.ledger.pages_for(prompt_len) > self.ledger.num_pages:
            pool = self.ledger.num_pages * self.ledger.page_size
            raise PromptTooLargeError(f"the prompt has {prompt_len} tokens and the whole pool holds {pool}")
        queued = len(self._waiting) + self._held
        if queued and queued + request.n > self._settings.max_waiting:
            waiting = f"{queued} sequence{' waits' if queued == 1 else 's wait'}"
            allowed = f"at most {self._settings.max_waiting} may (--max-waiting)"
            raise QueueFullError(f"the queue is full: {waiting}, {allowed}; try again later", _RETRY_SECONDS)
        self._arrivals += 1
        limit = min(prompt_len + request.max_tokens, self._context)
        sequences = [Sequence(request, i, self._arrivals, limit, self._clock()) for i in range(request.n)]
        self._live[request.request_id] = sequences
        self._held += len(sequences)
        self._queue(sequences[0])
        self._idle.clear()
        self._wakeup.set()

    def abort(self, request_id: str) -> bool:
        """Ends a live request: each continuation that still ran is finished with ABORTED. False if there is none."""
        sequences = self._live.get(request_id)
        if sequences is None:
            return False
        for sequence in sequences:
            if sequence.state is not State.ENDED:
                self._finish(sequence, Reason.ABORTED)
        self._wakeup.set()
        return True

    def cancel(self, request_id: str) -> None:
        """Ends a live request without a word to its listener; unknown ids are ignored."""
        for sequence in self._live.pop(request_id, ()):
            self._end(sequence)
        self._wakeup.set()

    def flush(self, namespace: bytes | None = None) -> int:
        """Forgets every cached prefix, or those of one namespace; returns the pages that came free."""
        return self.ledger.flush(namespace)

    def cache_stats(self) -> CacheStats:
        """What the prefix cache did and is."""
        return self.ledger.cache.stats()

    def top_prefixes(self, n: int) -> list[HotPrefix]:
        """The ``n`` most used prefixes in the cache; takes time in proportion to its nodes."""
        return self.ledger.cache.top_prefixes(n)

    def stats(self) -> Stats:
        """Counts, now."""
        pages = self.ledger.counts
        return Stats(
            pages_total=pages.total,
            pages_free=pages.free,
            pages_evictable=pages.evictable,
            pages_protected=pages.protected,
            pages_private=pages.private,
            pages_retiring=pages.retiring,
            page_size=self.ledger.page_size,
            nodes=self.ledger.cache.node_count,
            running=len(self._running),
            waiting=len(self._waiting) + self._held,
            hit_tokens=self._hit_tokens,
            lookup_tokens=self._lookup_tokens,
            evicted_pages=sum(self.cache_stats().evicted_pages),
            forwarded_tokens=self._forwarded_tokens,
            preemptions=self._preemptions,
            steps=self._steps_collected,
        )

    def close_admission(self) -> None:
        """Takes no new requests; live ones go on."""
        self._accepting = False

    def stop(self) -> None:
        """Ends ``run`` once what is in flight has landed; live requests fail."""
        self._accepting = False
        self._stopping = True
        self._wakeup.set()

    async def wait_idle(self) -> None:
        """Returns once nothing is live and nothing is in flight."""
        await self._idle.wait()

    # The loop.

    async def run(self) -> None:
        """Schedules until ``stop``.

        Raises:
            EngineError: The device is lost. Every live request failed with UnavailableError.
        """
        reason = "the server stopped"
        try:
            while not (self._stopping and not self._in_flight):
                if self._waiting or self._running or self._in_flight:
                    await self._turn()
                else:
                    self._idle.set()
                    self._wakeup.clear()
                    await self._wakeup.wait()
        except EngineError as error:
            reason = f"the engine is down: {error}"
            raise
        except BaseException:
            reason = "the scheduler failed"
            raise
        finally:
            self._accepting = False
            self._in_flight.clear()
            self.ledger.collect(self._step)
            for request_id in list(self._live):
                self._fail(request_id, UnavailableError(reason))
            self._idle.set()

    async def _turn(self) -> None:
        """One round: launch a step if there is one, then collect, leaving at most the new step in flight."""
        launched = False
        if not self._stopping:
            self._admit()
            if self._secure_pages() and (planned := plan(self._running, self._settings.chunk_tokens)):
                self._launch(planned)
                launched = True
        in_shadow = 1 if launched and self._settings.overlap else 0
        while len(self._in_flight) > in_shadow:
            await self._collect()

    def _admit(self) -> None:
        """Moves waiting sequences into the batch, in order, while there is room."""
        while (sequence := self._waiting.first()) is not None:
            request = sequence.request
            if self._outgrown(sequence):
                continue
            # Each running sequence may soon need a page; taking their last ones would only lead to preemption.
            spare = len(self._running)
            holding = self.ledger.admit(sequence.ids, namespace=request.namespace, bypass=request.bypass, spare=spare)
            if holding is None:
                if not self._running and not self._in_flight:
                    raise IntegrityError(f"nothing runs, and still no room for {request.request_id!r}")
                return
            self._waiting.pop()
            self._running[sequence] = None
            self._sampling.set(holding.row, request.sampling, sequence.index)
            if sequence.admit(holding, self._clock()):
                if not request.bypass:
                    self._lookup_tokens += sequence.prompt_len
                    self._hit_tokens += sequence.cached_tokens
                if sequence.index == 0:
                    request.listener.started(sequence.cached_tokens)

    def _secure_pages(self) -> bool:
        """Gives every running sequence the page its next token needs.

        Returns:
            False where pages are short and something in flight may still give some back: collect first.
        """
        for sequence in list(self._running):
            while (
                sequence.state is State.RUNNING
                and sequence.holding is not None
                and sequence.total < sequence.limit
                and not self.ledger.extend(sequence.holding, sequence.total)
            ):
                if self._in_flight:
                    return False
                if not self._outgrown(sequence):
                    self._preempt()
        return True

    def _outgrown(self, sequence: Sequence) -> bool:
        """Fails the request of a sequence that not even the whole pool can hold; its tokens so far stand."""
        if self.ledger.pages_for(sequence.total) <= self.ledger.num_pages:
            return False
        pool = self.ledger.num_pages * self.ledger.page_size
        error = OutgrownError(f"{sequence.total} tokens are more than the whole pool of {pool} can hold")
        self._fail(sequence.request.request_id, error)
        return True

    def _preempt(self) -> None:
        """Takes the pages of the newest of the lowest priority. Nothing is in flight, so it loses no token."""
        if len(self._running) == 1:
            raise IntegrityError("pages are short with a single sequence that fits the pool")
        victim = min(self._running, key=lambda s: (s.request.priority, -s.arrival_number, -s.index))
        self._preemptions += 1
        del self._running[victim]
        computed = victim.ids[: victim.computed]
        self.ledger.release(victim.preempt(), computed)
        self._waiting.push(victim)

    def _launch(self, planned: list[Planned]) -> None:
        self._step += 1
        self._engine.forward(build(self._step, planned, self.ledger, self._sampling))
        result = self._engine.sample()
        self.ledger.launch(self._step)
        self._in_flight.append(_InFlight(self._step, planned, result))
        for part in planned:
            part.sequence.launched += part.tokens
            part.sequence.in_flight += part.samples
        if self._trace is not None:
            self._trace("launch", self._step)

    async def _collect(self) -> None:
        """Waits for the oldest step in flight and publishes what it gave."""
        oldest = self._in_flight[0]
        await _resolved(oldest.result)
        self._in_flight.popleft()
        if self._trace is not None:
            self._trace("collect", oldest.step)
        try:
            result = oldest.result.result()
        except EngineError as error:
            if error.sticky:
                raise
            self._fail_step(oldest, error)
        else:
            self._publish(oldest.planned, result)
        self._steps_collected += 1
        self.ledger.collect(oldest.step)

    def _publish(self, planned: list[Planned], result: StepResult) -> None:
        """Hands out a step's tokens and shares the prefixes it completed; surplus rows are passed over."""
        now = self._clock()
        tokens = iter(result.tokens.tolist())
        for part, finite in zip(planned, result.finite.tolist(), strict=True):
            token_id = next(tokens) if part.samples else None
            sequence = part.sequence
            if sequence.state is not State.RUNNING or sequence.holding is None:
                continue
            if not finite:
                error = NotFiniteError("the model's numbers for this request were not finite")
                self._fail(sequence.request.request_id, error, trusted=False)
                continue
            sequence.computed += part.tokens
            self._forwarded_tokens += part.tokens
            if part.prefill:
                self.ledger.commit(sequence.holding, sequence.ids[: sequence.computed])
            if token_id is not None:
                self._publish_token(sequence, token_id, now)

    def _publish_token(self, sequence: Sequence, token_id: int, now: float) -> None:
        request = sequence.request
        sequence.append(token_id, now)
        if sequence.generated == 1 and sequence.index == 0:
            self._release_held(request.request_id)
        if token_id in request.stop_ids:
            self._finish(sequence, Reason.STOP, token_id)
        elif request.listener.token(sequence.index, token_id):
            self._finish(sequence, Reason.STOP)
        elif sequence.length >= sequence.limit:
            self._finish(sequence, Reason.LENGTH)

    # Ends.

    def _queue(self, sequence: Sequence) -> None:
        self._held -= 1
        sequence.state = State.WAITING
        self._waiting.push(sequence)

    def _release_held(self, request_id: str) -> None:
        """The first continuation has computed the prompt, so the others find it in the cache."""
        for sequence in self._live[request_id]:
            if sequence.state is State.HELD:
                self._queue(sequence)

    def _finish(self, sequence: Sequence, reason: Reason, stop_token_id: int | None = None) -> None:
        """One continuation ended well; the request ends with its last."""
        request = sequence.request
        self._end(sequence)
        request.listener.finished(sequence.index, sequence.outcome(reason, stop_token_id, self._clock()))
        if all(other.state is State.ENDED for other in self._live.get(request.request_id, ())):
            self._live.pop(request.request_id, None)

    def _fail(self, request_id: str, error: RequestError, *, trusted: bool = True) -> None:
        """A request ended with an error, all its continuations with it."""
        sequences = self._live.pop(request_id)
        for sequence in sequences:
            self._end(sequence, trusted=trusted)
        sequences[0].request.listener.failed(error)

    def _fail_step(self, failed: _InFlight, error: EngineError) -> None:
        requests = {part.sequence.request.request_id: part.sequence for part in failed.planned}
        for request_id, sequence in requests.items():
            if sequence.state is State.RUNNING:
                self._fail(request_id, StepFailedError(f"the engine failed: {error}"), trusted=False)

    def _end(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Takes a sequence out, wherever it is. Tokens in flight are dropped when their step is collected."""
        was = sequence.state
        holding = sequence.end()
        if was is State.HELD:
            self._held -= 1
        elif was is State.WAITING:
            self._waiting.remove(sequence)
        elif holding is not None:
            del self._running[sequence]
            if trusted:
                self.ledger.release(holding, sequence.ids[: sequence.computed], sequence.prompt_len)
            else:
                self.ledger.discard(holding)


async def _resolved(future: Future[StepResult]) -> None:
    """Returns once ``future`` has a result or an exception, having given other tasks a turn in any case."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    await done.wait()
