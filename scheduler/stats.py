"""What the scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot between two steps; the counters run since start.

    ``pages_free + pages_evictable + pages_protected + pages_private + pages_retiring == pages_total``, always. IDLE is:
    ``running``, ``waiting``, ``pages_protected``, ``pages_private`` and ``pages_retiring`` are 0.

    Attributes:
        pages_total: Pages in the pool.
        pages_free: Pages that hold nothing.
        pages_evictable: Pages of cached prefixes under no lock.
        pages_protected: Pages of cached prefixes that live sequences use.
        pages_private: Pages of one live sequence alone.
        pages_retiring: Pages waiting for the last launched step that may touch them.
        page_size: Tokens in a page.
        nodes: Nodes in the prefix cache.
        running: Sequences admitted and not ended.
        waiting: Sequences waiting for admission, preempted ones included.
        hit_tokens: Tokens found in the cache at first admissions.
        lookup_tokens: Tokens looked up there.
        evicted_pages: Pages evicted.
        forwarded_tokens: Tokens that went through the model.
        preemptions: Times a running sequence gave its pages up.
        steps: Steps collected.
    """

    pages_total: int
    pages_free: int
    pages_evictable: int
    pages_protected: int
    pages_private: int
    pages_retiring: int
    page_size: int
    nodes: int
    running: int
    waiting: int
    hit_tokens: int
    lookup_tokens: int
    evicted_pages: int
    forwarded_tokens: int
    preemptions: int
    steps: int

    @property
    def idle(self) -> bool:
        """Whether nothing is live and nothing is on its way back."""
        return not (self.running or self.waiting or self.pages_protected or self.pages_private or self.pages_retiring)
