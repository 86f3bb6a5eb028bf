"""The waiting queue: who is admitted next."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.sequence import Sequence


class WaitingQueue:
    """Higher priority first, then earlier arrival: a preempted sequence comes back to its old place.

    ``push``, ``pop`` and ``remove`` take O(log n) amortised: a removed sequence stays in the heap until it surfaces.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Sequence]] = []
        self._members: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence that is not in the queue."""
        key = (-sequence.request.priority, sequence.arrival_number, sequence.index, sequence)
        heapq.heappush(self._heap, key)
        self._members.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands."""
        self._members.remove(sequence)

    def first(self) -> Sequence | None:
        """The next to be admitted, left where it is."""
        while self._heap:
            sequence = self._heap[0][-1]
            if sequence in self._members:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Takes out the sequence that ``first`` names.

        Raises:
            IndexError: Nothing waits.
        """
        sequence = self.first()
        if sequence is None:
            raise IndexError("nothing waits")
        heapq.heappop(self._heap)
        self._members.remove(sequence)
        return sequence
