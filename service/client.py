"""The terminal's side: one call to a running server, or a conversation with it.

What the model says goes to standard output as it comes; everything about it goes to standard error. Ctrl-C cancels the
call, which frees what it held on the server.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click
import grpc
from radixd.v1 import generate_pb2 as pb
from radixd.v1 import generate_pb2_grpc, model_pb2, model_pb2_grpc

from service.errors import StartError

if TYPE_CHECKING:
    from types import TracebackType

INTERRUPTED = 130
MAX_MESSAGE_BYTES = 64 << 20
_CONNECT_SECONDS = 10.0


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


@dataclass(slots=True)
class Reply:
    """What one call brought.

    Attributes:
        texts: All of it, in pieces.
        started: The server's first word; None if it never came.
        finished: Its last; None if the call was interrupted.
        first_token: Seconds from the call to the first text.
        seconds: Seconds from the first text to the end.
    """

    texts: list[str] = field(default_factory=list)
    started: pb.Started | None = None
    finished: pb.Finished | None = None
    first_token: float | None = None
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    def reuse(self) -> str:
        """How much of the prompt came from the cache, in words."""
        if self.started is None:
            return "not started"
        return f"{self.started.cached_tokens} of {self.started.prompt_tokens} prompt tokens cached"

    def speed(self) -> str:
        """How fast it was, in words."""
        if self.finished is None or self.first_token is None:
            return "interrupted" if self.finished is None else "no tokens"
        tokens = self.finished.usage.completion_tokens
        rate = f", {(tokens - 1) / self.seconds:.1f} tok/s" if tokens > 1 and self.seconds > 0 else ""
        reason = pb.FinishReason.Name(self.finished.reason).removeprefix("FINISH_REASON_").lower()
        return f"TTFT {self.first_token * 1000:.0f} ms{rate}, ended by {reason}"

    def summary(self) -> str:
        """One line about it."""
        tokens = 0 if self.finished is None else self.finished.usage.completion_tokens
        return f"{tokens} tokens, {self.reuse()}, {self.speed()}"


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
        request = _request(options)
        if raw or not self._chat_template():
            request.text = prompt
        else:
            request.chat.messages.add(role="user", content=prompt)
        reply = self._stream(request)
        click.echo(reply.summary(), err=True)
        return 0 if reply.finished is not None else INTERRUPTED

    def chat(self, options: Options, *, system: str | None) -> int:
        """Talks until the user leaves; returns the exit code."""
        if not self._chat_template():
            raise StartError("the served model has no chat template; use radixd generate --raw")
        history = [] if system is None else [pb.ChatMessage(role="system", content=system)]
        # Imported for its effect: input() can then be edited, and has a history.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, PLC0415
        click.echo("Ctrl-D leaves, Ctrl-C ends a reply.", err=True)
        while (line := _ask()) is not None:
            if not line.strip():
                continue
            request = _request(options)
            question = pb.ChatMessage(role="user", content=line)
            request.chat.messages.extend([*history, question])
            reply = self._stream(request)
            click.echo(f"[{reply.reuse()}; {reply.speed()}]", err=True)
            # A turn that got no answer is forgotten: templates want the roles to alternate.
            if reply.text:
                history += [question, pb.ChatMessage(role="assistant", content=reply.text)]
        return 0

    def _chat_template(self) -> str:
        stub = model_pb2_grpc.ModelServiceStub(self._channel)
        try:
            return stub.GetModel(model_pb2.GetModelRequest(), timeout=_CONNECT_SECONDS).chat_template
        except grpc.RpcError as error:
            raise self._explained(error) from None
        except KeyboardInterrupt:
            raise click.Abort from None

    def _stream(self, request: pb.GenerateRequest) -> Reply:
        """Prints a reply as it comes; Ctrl-C ends it early."""
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
                    sys.stdout.write(response.delta.text)
                    sys.stdout.flush()
                else:
                    reply.finished = response.finished
        except KeyboardInterrupt:
            call.cancel()
        except grpc.RpcError as error:
            if reply.texts:
                click.echo()
            raise self._explained(error) from None
        if reply.first_token is not None:
            reply.seconds = time.monotonic() - began - reply.first_token
        click.echo()
        return reply

    def _explained(self, error: grpc.RpcError) -> StartError:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.UNAVAILABLE and "connect" in str(details).lower():
            return StartError(f"no server at {self._target}; start one with: radixd serve (or make serve)")
        return StartError(f"{code.name}: {details}")


def _request(options: Options) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    if options.max_tokens is not None:
        request.stop.max_tokens = options.max_tokens
    if options.temperature is not None:
        request.sampling.temperature = options.temperature
    if options.seed is not None:
        request.sampling.seed = options.seed
    request.stop.strings.extend(options.stop)
    return request


def _ask() -> str | None:
    """The next line the user types; None if they leave."""
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        click.echo(err=True)
        return None
