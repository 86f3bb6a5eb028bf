"""The Generate call: check, tokenize, submit, and write what comes until the last index ends.

Whatever way a call ends, the scheduler is told: a client that went away must not cost another step. A request is live,
under its id, from the call's first moment until just before its last message is written. So Abort also reaches it
while its prompt is still being tokenized, and a client that has read the last message may use the id again.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixd.v1 import generate_pb2 as pb
from radixd.v1 import generate_pb2_grpc

from scheduler.errors import DuplicateRequestError, QueueFullError, UnavailableError
from scheduler.request import Request
from service.access import AccessEntry
from service.errors import InvalidRequestError
from service.stream import TokenStream, aborted_early
from service.text import StopStrings, TextOutput
from service.validation import Checked, check_request, fit_prompt

if TYPE_CHECKING:
    import grpc
    import structlog.typing

    from kvcache.base import Int32Array
    from scheduler.scheduler import Scheduler
    from service.model import ServedModel
    from service.prompts import Prompts

_RETRY_SECONDS = 1.0
_PROMPT_FIELDS = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages"}


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What took time to make of a request."""

    ids: Int32Array
    stops: StopStrings


@dataclass(slots=True, eq=False)
class _Live:
    """A live request; until it is submitted, ``preparing`` is where its prompt's ids will be."""

    preparing: asyncio.Future[_Prepared] | None = None
    aborted: bool = False


class GenerateServicer(generate_pb2_grpc.GenerateServiceServicer):
    """Serves GenerateService.

    Args:
        scheduler: Runs the requests.
        model: The served model.
        prompts: Tokenizes, away from the event loop.
        max_waiting: Requests that may wait for their prompt's ids; more are refused.
        log: Gets one line for each call.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model: ServedModel,
        prompts: Prompts,
        max_waiting: int,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._scheduler = scheduler
        self._model = model
        self._limits = model.limits
        self._prompts = prompts
        self._max_waiting = max_waiting
        self._log = log
        self._live: dict[str, _Live] = {}
        self._preparing = 0
        self._calls = 0
        self._no_calls = asyncio.Event()
        self._no_calls.set()
        self._draining = False

    @property
    def calls(self) -> int:
        """Calls that have not ended."""
        return self._calls

    def close(self) -> None:
        """Refuses new calls; running ones go on."""
        self._draining = True

    async def wait_closed(self) -> None:
        """Returns once no call is running."""
        await self._no_calls.wait()

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """See the proto. Writes to the context; a generator would learn late, or never, that its client went away."""
        entry = AccessEntry(request.request_id or uuid.uuid4().hex, time.monotonic())
        self._calls += 1
        self._no_calls.clear()
        try:
            await self._serve(request, context, entry)
        except BaseException as error:
            entry.fail(error, context)
            raise
        finally:
            entry.write(self._log)
            self._calls -= 1
            if not self._calls:
                self._no_calls.set()

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AbortResponse:
        """See the proto."""
        if not request.request_id:
            raise InvalidRequestError.of("request_id", "must not be empty")
        live = self._live.get(request.request_id)
        if live is not None and live.preparing is not None:
            live.aborted = True
            live.preparing.cancel()
            return pb.AbortResponse(found=True)
        return pb.AbortResponse(found=self._scheduler.abort(request.request_id))

    async def _serve(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any], entry: AccessEntry
    ) -> None:
        if self._draining:
            raise UnavailableError("the server is draining and takes no new requests")
        self._model.require(request.model)
        checked = check_request(request, self._limits)
        request_id = entry.request_id
        if request_id in self._live:
            raise DuplicateRequestError(f"a live request has the id {request_id!r}")
        live = self._live[request_id] = _Live()
        try:
            prepared = await self._prepare(request, checked, live)
            if prepared is None:
                self._forget(request_id, live)
                for response in aborted_early(checked.n):
                    await context.write(response)
                entry.aborted = True
                return
            entry.submitted = time.monotonic()
            stream = entry.stream = self._submit(request, request_id, checked, prepared)
            try:
                await self._write(stream, context, request_id, live)
            finally:
                # Once it has ended the id may belong to another request.
                if not stream.ended:
                    self._scheduler.cancel(request_id)
        finally:
            self._forget(request_id, live)

    async def _prepare(self, request: pb.GenerateRequest, checked: Checked, live: _Live) -> _Prepared | None:
        """Tokenizes the prompt and compiles the stop strings; None if Abort came first."""

        def prepare() -> _Prepared:
            return _Prepared(self._prompts.ids_of(request), StopStrings(checked.stop_strings))

        if self._preparing >= self._max_waiting:
            waiting = f"{self._preparing} prompt{' waits' if self._preparing == 1 else 's wait'} to be tokenized"
            limit = f"at most {self._max_waiting} may (--max-waiting)"
            raise QueueFullError(f"the queue is full: {waiting}, {limit}; try again later", _RETRY_SECONDS)
        self._preparing += 1
        live.preparing = self._prompts.run(prepare)
        try:
            prepared = await live.preparing
        except asyncio.CancelledError:
            if live.aborted:
                return None
            raise
        finally:
            self._preparing -= 1
            live.preparing = None
        # Abort may also come when all is prepared and this call has not had its turn yet.
        return None if live.aborted else prepared

    def _submit(
        self, request: pb.GenerateRequest, request_id: str, checked: Checked, prepared: _Prepared
    ) -> TokenStream:
        field = _PROMPT_FIELDS[str(request.WhichOneof("prompt"))]
        max_tokens = fit_prompt(field, len(prepared.ids), checked.max_tokens, self._limits)
        outputs = [
            TextOutput(
                self._model.tokenizer,
                prepared.stops,
                include_stop=request.stop.include_stop,
                keep_special=request.output.keep_special_tokens,
            )
            for _ in range(checked.n)
        ]
        started = pb.Started(request_id=request_id, model=self._model.spec.name, prompt_tokens=len(prepared.ids))
        stream = TokenStream(outputs, started, want_ids=request.output.token_ids)
        self._scheduler.submit(
            Request(
                request_id=request_id,
                prompt_ids=prepared.ids,
                max_tokens=max_tokens,
                listener=stream,
                sampling=checked.sampling,
                n=checked.n,
                stop_ids=checked.stop_ids,
                priority=request.priority,
                namespace=checked.namespace,
                bypass=request.cache.bypass,
            )
        )
        return stream

    async def _write(
        self, stream: TokenStream, context: grpc.aio.ServicerContext[Any, Any], request_id: str, live: _Live
    ) -> None:
        while True:
            await stream.wait()
            responses = stream.take()
            ended = stream.ended
            if ended:
                self._forget(request_id, live)
            for response in responses:
                await context.write(response)
            if ended:
                break
        if stream.error is not None:
            raise stream.error

    def _forget(self, request_id: str, live: _Live) -> None:
        if self._live.get(request_id) is live:
            del self._live[request_id]
