"""A request as the scheduler sees it: token ids in, token ids out, no text and no protobuf.

A ``Request`` is what a client sent. It owns one ``Sequence`` (see sequence.py) for each continuation; the sequences are
what is scheduled. What happens to them is told to the request's ``Listener``, synchronously and in order, between two
steps, on the scheduler's event loop.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvcache.base import Int32Array
    from scheduler.errors import RequestError


class Reason(enum.Enum):
    """Why a continuation ended without an error."""

    STOP = enum.auto()
    LENGTH = enum.auto()
    ABORTED = enum.auto()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, validated and with every default filled in.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: In (0, 1]; 1 is off.
        min_p: In [0, 1]; 0 is off.
        seed: In [0, 2**64).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one continuation ended.

    Attributes:
        reason: Why.
        stop_token_id: The stop or end-of-sequence id that ended it, if one did.
        prompt_tokens: Tokens in the prompt.
        cached_tokens: Of these, tokens that came from the cache at the first admission.
        completion_tokens: Tokens generated, the one that stopped it included.
        queue: Seconds from arrival to the first admission, or to the end if there was none.
        prefill: Seconds from the first admission to the first token.
        decode: Seconds from the first token to the last.
    """

    reason: Reason
    stop_token_id: int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue: float
    prefill: float
    decode: float


class Listener(Protocol):
    """Hears what happens to one request. Calls must be quick and must not raise: the next step waits for them.

    For each index, tokens come in order, then exactly one ``finished``; or, for the whole request, one ``failed`` after
    which nothing comes. After ``Scheduler.cancel`` nothing comes either.
    """

    def started(self, cached_tokens: int) -> None:
        """The first continuation was admitted; called once, whatever preemption follows."""
        ...

    def token(self, index: int, token_id: int) -> bool:
        """Continuation ``index`` generated a token; returns True to end it here, with reason STOP.

        Not called for a stop or end-of-sequence id: these come with ``finished``.
        """
        ...

    def finished(self, index: int, outcome: Outcome) -> None:
        """Continuation ``index`` ended."""
        ...

    def failed(self, error: RequestError) -> None:
        """The request ended with an error; continuations that had finished stay finished."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """What a client asked for, validated.

    Attributes:
        request_id: Unique among live requests.
        prompt_ids: int32[n], n at least 1.
        max_tokens: Tokens to generate for each continuation, at least 1; the context's end may come first.
        listener: Who hears what happens.
        sampling: How tokens are drawn.
        n: Continuations, at least 1.
        stop_ids: Ids that end a continuation, end-of-sequence ids included unless they are to be ignored.
        priority: Higher is admitted first.
        namespace: Prefixes are shared only within one.
        bypass: Neither read nor write the cache.
    """

    request_id: str
    prompt_ids: Int32Array
    max_tokens: int
    listener: Listener
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    namespace: bytes = b""
    bypass: bool = False
