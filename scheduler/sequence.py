"""One continuation of a request: the unit that is admitted, batched, preempted and finished.

Token counts, always ordered ``computed <= launched <= length + in_flight``:

* ``length``: ids the host knows, prompt and output;
* ``in_flight``: ids sampled by launched steps that the host has not collected (0 to 2 under overlap);
* ``launched``: ids whose forward pass was launched, so whose KV the next step may read;
* ``computed``: ids whose forward pass was collected, so whose KV may be shared.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scheduler.request import Outcome, Reason

if TYPE_CHECKING:
    from kvcache.base import Int32Array
    from kvcache.ledger import Holding
    from scheduler.request import Request


class State(enum.Enum):
    """Where a sequence is. HELD: it waits for its request's first continuation to compute the prompt."""

    HELD = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True)
class Timeline:
    """When things happened, in the scheduler clock's seconds; None is not yet."""

    arrived: float
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Sequence:
    """Continuation ``index`` of ``request``.

    Args:
        request: Whose.
        index: Which, in [0, request.n).
        arrival_number: Counts requests in order of arrival.
        limit: Tokens, prompt and output, at which it ends with LENGTH.
        now: When the request arrived.
    """

    __slots__ = (
        "_ids",
        "arrival_number",
        "cached_tokens",
        "computed",
        "holding",
        "in_flight",
        "index",
        "launched",
        "length",
        "limit",
        "prompt_len",
        "request",
        "state",
        "timeline",
    )

    def __init__(self, request: Request, index: int, arrival_number: int, limit: int, now: float) -> None:
        self.request = request
        self.index = index
        self.arrival_number = arrival_number
        self.limit = limit
        self.prompt_len = self.length = len(request.prompt_ids)
        self.state = State.HELD
        self.holding: Holding | None = None
        self.launched = self.computed = self.in_flight = 0
        self.cached_tokens = 0
        self.timeline = Timeline(now)
        self._ids: Int32Array = request.prompt_ids

    @property
    def ids(self) -> Int32Array:
        """The ids the host knows, int32[length]; a view, good until the next ``append``."""
        return self._ids[: self.length]

    @property
    def total(self) -> int:
        """Tokens, known and in flight."""
        return self.length + self.in_flight

    @property
    def generated(self) -> int:
        """Output tokens the host knows."""
        return self.length - self.prompt_len

    def append(self, token_id: int, now: float) -> None:
        """A sampled token was collected."""
        if self.length == len(self._ids):
            # Doubling; the prompt, shared by the request's continuations, is copied with the first token.
            grown = np.empty(min(self.limit, 2 * self.length + 64), dtype=np.int32)
            grown[: self.length] = self._ids
            self._ids = grown
        self._ids[self.length] = token_id
        self.length += 1
        self.in_flight -= 1
        if self.timeline.first_token is None:
            self.timeline.first_token = now
        self.timeline.last_token = now

    def admit(self, holding: Holding, now: float) -> bool:
        """It got its pages; returns True if this is its first admission."""
        self.state = State.RUNNING
        self.holding = holding
        self.launched = self.computed = holding.admitted_len
        if self.timeline.admitted is not None:
            return False
        self.timeline.admitted = now
        self.cached_tokens = holding.admitted_len
        return True

    def preempt(self) -> Holding:
        """It gives its pages up and waits again, with nothing in flight; returns what it held."""
        if self.in_flight or self.holding is None:
            raise RuntimeError("only a running sequence with nothing in flight can be preempted")
        holding, self.holding = self.holding, None
        self.state = State.WAITING
        return holding

    def end(self) -> Holding | None:
        """It is over: tokens still in flight will be dropped; returns what it held, if it was running."""
        holding, self.holding = self.holding, None
        self.state = State.ENDED
        return holding

    def outcome(self, reason: Reason, stop_token_id: int | None, now: float) -> Outcome:
        """How it ended, for its listener."""
        line = self.timeline
        admitted = now if line.admitted is None else line.admitted
        first = now if line.first_token is None else line.first_token
        last = first if line.last_token is None else line.last_token
        return Outcome(
            reason=reason,
            stop_token_id=stop_token_id,
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.generated,
            queue=admitted - line.arrived,
            prefill=first - admitted,
            decode=last - first,
        )
