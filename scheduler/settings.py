"""The scheduler's limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What an operator may set.

    Attributes:
        max_running: Sequences that may run at once.
        chunk_tokens: Prompt tokens that one step computes at most, beside one token for each decoding sequence.
        max_waiting: Sequences that may wait at once; more are refused.
        overlap: Launch a step before the one before it is collected. Off, the tokens are the same.
    """

    max_running: int = 64
    chunk_tokens: int = 512
    max_waiting: int = 1024
    overlap: bool = True
