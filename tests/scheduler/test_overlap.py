"""Step N+1 is launched before step N is collected, and nobody can tell from the tokens."""

from __future__ import annotations

import pytest

from scheduler.request import Reason
from tests.scheduler.harness import Crank, Harness, solo

PROMPT = list(range(40, 57))


async def test_each_step_is_launched_before_the_one_before_it_is_collected() -> None:
    async with Harness(chunk_tokens=8) as harness:
        await harness.run("a", PROMPT, 6)
        await harness.idle()
    events = harness.events
    steps = max(step for _, step in events)
    assert steps >= 8
    for step in range(1, steps):
        assert events.index(("launch", step + 1)) < events.index(("collect", step))
        assert events.index(("collect", step)) < events.index(("collect", step + 1))


async def test_without_overlap_each_step_is_collected_before_the_next_is_launched() -> None:
    async with Harness(overlap=False, chunk_tokens=8) as harness:
        await harness.run("a", PROMPT, 6)
    assert harness.events == [
        event for step in range(1, len(harness.events) // 2 + 1) for event in [("launch", step), ("collect", step)]
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("cache", ["radix", "naive"])
@pytest.mark.parametrize("overlap", [True, False])
async def test_batching_caching_and_overlap_do_not_change_the_tokens(
    temperature: float, page_size: int, cache: str, overlap: bool
) -> None:
    prompts = {f"r{i}": [33 + i % 3, *range(50, 50 + 7 * i)] for i in range(6)}
    async with Harness(page_size=page_size, cache=cache, overlap=overlap, chunk_tokens=5) as harness:
        for _ in range(2):
            runs = {
                name: harness.submit(name, prompt, 9, temperature=temperature, seed=7)
                for name, prompt in prompts.items()
            }
            for name, run in runs.items():
                await run.done.wait()
                assert run.output == await solo(prompts[name], 9, temperature=temperature, seed=7)
            await harness.idle()


async def test_a_token_sampled_beyond_the_end_is_neither_sent_nor_counted_nor_cached() -> None:
    script = {"requests": {"a": {"tokens": [65, 66]}}}
    async with Harness(script) as harness:
        run = await harness.run("a", PROMPT, 20)
        await harness.idle()
        assert run.output == [65, 66]
        assert run.outcomes[0].completion_tokens == 3
        assert run.reason is Reason.STOP
        assert run.outcomes[0].stop_token_id == 257
        # The prompt, 65 and 66 were computed; the row for the end-of-sequence id ran, but as a surplus.
        assert harness.scheduler.stats().forwarded_tokens == len(PROMPT) + 2
        cached = harness.scheduler.ledger.cache.match_prefix([*PROMPT, 65, 66, 257, 257]).cached_len
        assert cached == len(PROMPT) + 2


async def test_the_loop_does_not_launch_a_third_step() -> None:
    crank = Crank(auto=False)
    async with Harness(crank=crank, chunk_tokens=4) as harness:
        run = harness.submit("a", PROMPT, 4)
        await harness.settle()
        assert harness.events == [("launch", 1), ("launch", 2)]
        crank.auto = True
        crank.turn()
        await run.done.wait()
        await harness.idle()
