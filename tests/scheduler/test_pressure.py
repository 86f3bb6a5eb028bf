"""Pools too small for what is asked: preemption, refusals, and who is not hurt by them (field-bugs B)."""

from __future__ import annotations

import pytest

from scheduler.errors import OutgrownError, PromptTooLargeError, QueueFullError
from scheduler.request import Reason
from tests.scheduler.harness import Crank, Harness, solo


def prompt(first: int, length: int) -> list[int]:
    return [33 + (first + i * 7) % 90 for i in range(length)]


@pytest.mark.parametrize("page_size", [1, 4])
async def test_a_preempted_request_repeats_and_loses_nothing(page_size: int) -> None:
    """B3: a pool for one and a half requests, chunk 4."""
    older, newer = prompt(0, 16), prompt(50, 16)
    async with Harness(page_size=page_size, pool_tokens=60, chunk_tokens=4) as harness:
        first, second = harness.submit("a", older, 24), harness.submit("b", newer, 24)
        await first.done.wait()
        await second.done.wait()
        assert harness.scheduler.stats().preemptions >= 1
        assert first.output == await solo(older, 24)
        assert second.output == await solo(newer, 24)
        for run in (first, second):
            assert run.outcomes[0].prompt_tokens == 16
            assert run.outcomes[0].completion_tokens == 24
        await harness.idle()


async def test_a_seeded_request_draws_the_same_tokens_after_preemption() -> None:
    older, newer = prompt(0, 16), prompt(50, 16)
    async with Harness(pool_tokens=60, chunk_tokens=4) as harness:
        first = harness.submit("a", older, 24, temperature=1.0, seed=1)
        second = harness.submit("b", newer, 24, temperature=1.0, seed=42)
        await first.done.wait()
        await second.done.wait()
        assert harness.scheduler.stats().preemptions >= 1
        assert second.output == await solo(newer, 24, temperature=1.0, seed=42)


async def test_what_can_never_fit_fails_and_does_not_block_the_queue() -> None:
    """B4: pool 64, context 256."""
    async with Harness(pool_tokens=64, context=256) as harness:
        with pytest.raises(PromptTooLargeError):
            harness.submit("huge", prompt(0, 100), 8)
        greedy = harness.submit("outgrows", prompt(1, 60), 100)
        small = harness.submit("small", prompt(2, 8), 8)
        await greedy.done.wait()
        await small.done.wait()
        assert isinstance(greedy.error, OutgrownError)
        # 64 slots hold 60 prompt and 4 output tokens; the fifth was sampled from the last of them.
        assert greedy.output == (await solo(prompt(1, 60), 5))
        assert small.output == await solo(prompt(2, 8), 8)
        await harness.idle()


async def test_four_sequences_at_a_page_border_with_three_pages_left_all_finish() -> None:
    """B5: page 4, KV lengths 0 mod 4."""
    prompts = [prompt(20 * i, 8) for i in range(4)]
    async with Harness(page_size=4, pool_tokens=4 * (4 * 2 + 3), chunk_tokens=64) as harness:
        runs = [harness.submit(f"r{i}", p, 12) for i, p in enumerate(prompts)]
        for run, p in zip(runs, prompts, strict=True):
            await run.done.wait()
            assert run.output == await solo(p, 12)
        assert harness.scheduler.stats().preemptions >= 1
        await harness.idle()


async def test_a_request_placed_in_a_step_is_not_preempted_later_in_it() -> None:
    """B6: a full pool, three decodes of low priority, one arrival of high priority at a page border."""
    prompts = [prompt(20 * i, 8) for i in range(4)]
    crank = Crank(auto=False)
    async with Harness(page_size=4, pool_tokens=40, crank=crank, chunk_tokens=64) as harness:
        runs = [harness.submit(f"low{i}", p, 12) for i, p in enumerate(prompts[:3])]
        for _ in range(3):
            await harness.settle()
            crank.turn()
        runs.append(harness.submit("high", prompts[3], 12, priority=1))
        crank.auto = True
        crank.turn()
        for run, p in zip(runs, prompts, strict=True):
            await run.done.wait()
            assert run.output == await solo(p, 12)
        await harness.idle()


async def test_a_higher_priority_is_admitted_first_and_equals_in_order_of_arrival() -> None:
    order: list[str] = []
    async with Harness(max_running=1) as harness:
        blocker = harness.submit("blocker", prompt(0, 4), 4)
        runs = {
            name: harness.submit(name, prompt(i, 4), 2, priority=priority)
            for i, (name, priority) in enumerate([("low", -1), ("first", 0), ("second", 0), ("high", 5)])
        }
        for name, run in runs.items():
            run.started = lambda cached, name=name, run=run: (order.append(name), setattr(run, "cached", cached))  # type: ignore[method-assign]
        await blocker.done.wait()
        for run in runs.values():
            await run.done.wait()
    assert order == ["high", "first", "second", "low"]


async def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    crank = Crank(auto=False)
    async with Harness(max_running=1, max_waiting=2, crank=crank) as harness:
        runs = [harness.submit("running", prompt(0, 4))]
        await harness.settle()
        runs += [harness.submit(f"w{i}", prompt(i, 4)) for i in range(2)]
        with pytest.raises(QueueFullError) as refused:
            harness.submit("more", prompt(9, 4))
        assert refused.value.retry_after > 0
        crank.auto = True
        crank.turn()
        for run in runs:
            await run.done.wait()
            assert run.reason is Reason.LENGTH


async def test_a_pool_far_too_small_for_all_still_serves_all() -> None:
    prompts = [prompt(11 * i, 3 + i % 9) for i in range(12)]
    async with Harness(page_size=4, pool_tokens=48, chunk_tokens=5) as harness:
        runs = [harness.submit(f"r{i}", p, 20) for i, p in enumerate(prompts)]
        for run, p in zip(runs, prompts, strict=True):
            await run.done.wait()
            assert run.output == await solo(p, 20)
        await harness.idle()
