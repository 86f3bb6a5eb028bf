"""Seeded runs of everything at once: arrivals, cancels, aborts, flushes, small pools; a seed replays exactly."""

from __future__ import annotations

import random
from typing import Any

import pytest

from scheduler.errors import OutgrownError, PromptTooLargeError, RequestError
from scheduler.request import Reason
from tests.scheduler.harness import Crank, Harness, Recorder, solo


class Run:
    """One seeded run; ``events`` is what happened, for comparing replays."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.page_size = self.random.choice([1, 1, 4, 16])
        self.pool_tokens = self.page_size * self.random.randint(8, 40)
        self.settings = {
            "chunk_tokens": self.random.choice([1, 3, 8, 64]),
            "max_running": self.random.randint(1, 6),
            "overlap": self.random.random() < 0.8,
        }
        self.cache = self.random.choice(["radix", "radix", "radix", "naive"])
        self.expected: dict[str, tuple[list[int], dict[str, Any]]] = {}
        self.live: dict[str, Recorder] = {}
        self.ended: dict[str, Recorder] = {}
        self.stems = [[self.random.randint(33, 126) for _ in range(40)] for _ in range(3)]

    def arrive(self, harness: Harness, name: str) -> None:
        stem = self.random.choice(self.stems)
        prompt = stem[: self.random.randint(1, 30)] + [self.random.randint(33, 126)] * self.random.randint(0, 3)
        fields: dict[str, Any] = {
            "max_tokens": self.random.randint(1, 24),
            "temperature": self.random.choice([0.0, 1.0]),
            "seed": self.random.randint(0, 3),
        }
        extra: dict[str, Any] = {
            "priority": self.random.choice([0, 0, 0, 1]),
            "bypass": self.random.random() < 0.1,
            "namespace": self.random.choice([b"", b"", b"tenant"]),
            "n": self.random.choice([1, 1, 1, 3]),
        }
        try:
            self.live[name] = harness.submit(name, prompt, **fields, **extra)
            self.expected[name] = (prompt, fields)
        except PromptTooLargeError:
            assert len(prompt) > self.pool_tokens

    def disturb(self, harness: Harness) -> None:
        """Something that a client or an operator may do at any time."""
        if not self.live:
            return
        name = self.random.choice(sorted(self.live))
        match self.random.randrange(8):
            case 0:
                harness.scheduler.cancel(name)
                self.live.pop(name).silent = True
            case 1:
                assert harness.scheduler.abort(name)
                assert self.live[name].done.is_set()
            case 2:
                harness.scheduler.flush()

    def sweep(self) -> None:
        for name in [name for name, run in self.live.items() if run.done.is_set()]:
            self.ended[name] = self.live.pop(name)


async def simulate(seed: int, arrivals: int = 25) -> list[tuple[str, list[int], str]]:
    run = Run(seed)
    crank = Crank(auto=False)
    async with Harness(
        page_size=run.page_size, pool_tokens=run.pool_tokens, cache=run.cache, crank=crank, **run.settings
    ) as harness:
        for i in range(arrivals):
            run.arrive(harness, f"r{i}")
            for _ in range(run.random.randint(0, 4)):
                if run.random.random() < 0.8:
                    crank.turn()
                await harness.settle(run.random.randint(1, 8))
                run.sweep()
                run.disturb(harness)
                run.sweep()
        crank.auto = True
        crank.turn()
        for recorder in list(run.live.values()):
            await recorder.done.wait()
        run.sweep()
        await harness.idle()
        harness.scheduler.flush()
        assert harness.scheduler.stats().pages_free == harness.scheduler.stats().pages_total
    log = []
    for name, recorder in run.ended.items():
        prompt, fields = run.expected[name]
        alone = await solo(prompt, **fields)
        assert recorder.output == alone[: len(recorder.output)], name
        if recorder.error is None and recorder.reason is Reason.LENGTH:
            assert recorder.output == alone, name
        assert isinstance(recorder.error, OutgrownError | None), recorder.error
        log.append((name, recorder.output, end_of(recorder.error)))
    return log


def end_of(error: RequestError | None) -> str:
    return "ok" if error is None else type(error).__name__


@pytest.mark.parametrize("seed", range(40))
async def test_every_page_and_every_token_is_accounted_for(seed: int) -> None:
    await simulate(seed)


async def test_a_seed_replays_exactly() -> None:
    assert await simulate(7) == await simulate(7)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
async def test_many_more_seeds(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        await simulate(seed)
