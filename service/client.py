"""The terminal's side of a call to a running server.

What the model says goes to standard output as it comes; everything about it goes to standard error. Ctrl-C cancels the
call, which frees what it held on the server.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import click
import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from radixd.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    generate_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    text_pb2,
    text_pb2_grpc,
)
from radixd.v1 import generate_pb2 as pb

from service.errors import StartError
from service.terminal import say

if TYPE_CHECKING:
    from types import TracebackType

INTERRUPTED = 130
MAX_MESSAGE_BYTES = 64 << 20
_UNARY_SECONDS = 10.0


class CallError(StartError):
    """A call failed; the message is one line.

    Attributes:
        code: The status it ended with.
        may_retry: The server says that the same call may succeed later.
    """

    def __init__(self, message: str, code: grpc.StatusCode, *, may_retry: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.may_retry = may_retry


@dataclass(frozen=True, slots=True)
class Options:
    """What may be said about each reply; None and empty leave it to the server.

    Attributes:
        max_tokens: Tokens at most.
        temperature: 0 is greedy.
        seed: Makes the same call draw the same tokens.
        stop: Texts to stop before.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def request(self) -> pb.GenerateRequest:
        """A request that still lacks its prompt."""
        # The ids are asked for to count them: text says little about how many tokens it was.
        request = pb.GenerateRequest(output=pb.OutputOptions(token_ids=True))
        if self.max_tokens is not None:
            request.stop.max_tokens = self.max_tokens
        if self.temperature is not None:
            request.sampling.temperature = self.temperature
        if self.seed is not None:
            request.sampling.seed = self.seed
        request.stop.strings.extend(self.stop)
        return request


@dataclass(slots=True)
class Reply:
    """What one call brought.

    Attributes:
        texts: All of it, in pieces.
        tokens: How many it was made of.
        started: The server's first word; None if it never came.
        finished: Its last; None if the call was interrupted.
        first_token: Seconds from the call to the first token.
        seconds: Seconds from the first token to the end.
    """

    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    started: pb.Started | None = None
    finished: pb.Finished | None = None
    first_token: float | None = None
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    def length(self) -> str:
        """How long it got, in words."""
        count = f"{self.tokens} token{'' if self.tokens == 1 else 's'}"
        return count if self.finished is not None else f"interrupted after {count}"

    def reuse(self) -> str:
        """How much of the prompt came from the cache, in words."""
        if self.started is None:
            return "not started"
        return f"{self.started.cached_tokens} of {self.started.prompt_tokens} prompt tokens cached"

    def speed(self) -> str:
        """How fast it was and how it ended, in words."""
        words = []
        if self.first_token is not None:
            words.append(f"TTFT {self.first_token * 1000:.0f} ms")
            if self.tokens > 1 and self.seconds > 0:
                words.append(f"{(self.tokens - 1) / self.seconds:.1f} tok/s")
        if self.finished is not None:
            reason = pb.FinishReason.Name(self.finished.reason).removeprefix("FINISH_REASON_").lower()
            words.append(f"ended by {reason}")
        return ", ".join(words)

    def summary(self) -> str:
        """One line about it."""
        return ", ".join(part for part in (self.length(), self.reuse(), self.speed()) if part)


class Client:
    """A connection to a server.

    Args:
        target: host:port.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._channel = grpc.insecure_channel(
            target,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ],
        )
        self._stub = generate_pb2_grpc.GenerateServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._channel.close()

    def generate(self, prompt: str, options: Options, *, raw: bool) -> int:
        """Streams one reply to the terminal; returns the exit code."""
        request = options.request()
        if not raw and not self.model().chat_template:
            click.echo(
                "radixd: the model has no chat template; it continues the prompt as plain text (--raw)", err=True
            )
            raw = True
        if raw:
            request.text = prompt
        else:
            request.chat.messages.add(role="user", content=prompt)
        reply = self.stream(request)
        click.echo(reply.summary(), err=True)
        return 0 if reply.finished is not None else INTERRUPTED

    def model(self) -> model_pb2.GetModelResponse:
        """The served model.

        Raises:
            CallError: There is no server, or it is no radixd.
        """
        stub = model_pb2_grpc.ModelServiceStub(self._channel)
        try:
            return stub.GetModel(model_pb2.GetModelRequest(), timeout=_UNARY_SECONDS)
        except grpc.RpcError as error:
            raise self._explained(error) from None

    def stats(self) -> cache_pb2.GetStatsResponse:
        """The server's counts.

        Raises:
            CallError: As ``model``.
        """
        stub = cache_pb2_grpc.CacheServiceStub(self._channel)
        try:
            return stub.GetStats(cache_pb2.GetStatsRequest(), timeout=_UNARY_SECONDS)
        except grpc.RpcError as error:
            raise self._explained(error) from None

    def prefixes(self, limit: int, text_bytes: int) -> list[cache_pb2.CachedPrefix]:
        """The most used prefixes of its cache.

        Raises:
            CallError: As ``model``.
        """
        stub = cache_pb2_grpc.CacheServiceStub(self._channel)
        request = cache_pb2.ListPrefixesRequest(limit=limit, text_bytes=text_bytes)
        try:
            return list(stub.ListPrefixes(request, timeout=_UNARY_SECONDS).prefixes)
        except grpc.RpcError as error:
            raise self._explained(error) from None

    def prompt_tokens(self, chat: pb.Chat) -> int | None:
        """How many tokens a conversation has; None if the server does not say."""
        stub = text_pb2_grpc.TextServiceStub(self._channel)
        try:
            return len(stub.RenderChat(text_pb2.RenderChatRequest(chat=chat), timeout=_UNARY_SECONDS).token_ids)
        except grpc.RpcError:
            return None

    def stream(self, request: pb.GenerateRequest) -> Reply:
        """Prints a reply as it comes; Ctrl-C ends it early.

        Raises:
            CallError: The call failed, whatever was printed before.
        """
        reply = Reply()
        began = time.monotonic()
        call = self._stub.Generate(request)
        try:
            for response in call:
                if response.HasField("started"):
                    reply.started = response.started
                elif response.HasField("delta"):
                    if reply.first_token is None:
                        reply.first_token = time.monotonic() - began
                    reply.texts.append(response.delta.text)
                    reply.tokens += len(response.delta.token_ids)
                    say(response.delta.text)
                else:
                    reply.finished = response.finished
        except KeyboardInterrupt:
            call.cancel()
        except grpc.RpcError as error:
            if reply.text:
                say("\n")
            raise self._explained(error) from None
        if reply.first_token is not None:
            reply.seconds = time.monotonic() - began - reply.first_token
        say("\n")
        return reply

    def _explained(self, error: grpc.RpcError) -> CallError:
        code, said = error.code(), " ".join(str(error.details()).split())
        where = f"{self._target} (--target or RADIXD_TARGET)"
        if code is grpc.StatusCode.UNAVAILABLE and "resol" in said.lower():
            message = f"no server at {where}: the host's name is not known"
        elif code is grpc.StatusCode.UNAVAILABLE and "connect" in said.lower():
            message = f"no server at {where}; start one with: radixd serve (or make serve)"
        elif code is grpc.StatusCode.UNIMPLEMENTED and "method" in said.lower():
            message = f"no radixd server at {where}, but some other: {said}"
        else:
            message = f"{code.name}: {said}"
        status = rpc_status.from_call(cast("grpc.Call", error))
        details = () if status is None else status.details
        may_retry = any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)
        return CallError(message, code, may_retry=may_retry)
