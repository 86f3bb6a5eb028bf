"""What the prefix cache gives the scheduler, and the faults that reuse has caused elsewhere (field-bugs A)."""

from __future__ import annotations

import pytest

from tests.scheduler.harness import Crank, Harness, solo

PROMPT = list(range(40, 52))


@pytest.mark.parametrize("page_size", [1, 4])
async def test_a_second_request_computes_only_its_suffix(page_size: int) -> None:
    async with Harness(page_size=page_size) as harness:
        await harness.run("a", PROMPT, 4)
        before = harness.scheduler.stats().forwarded_tokens
        run = await harness.run("b", [*PROMPT, 99, 100], 1)
        await harness.idle()
        assert run.cached == len(PROMPT)
        assert harness.scheduler.stats().forwarded_tokens - before == 2


async def test_outputs_are_reusable_as_well_as_prompts() -> None:
    async with Harness() as harness:
        first = await harness.run("a", PROMPT, 6)
        history = [*PROMPT, *first.output]
        second = await harness.run("b", [*history, 70, 71], 2)
        # The last token of the first output was sampled but never computed.
        assert second.cached == len(history) - 1
        assert second.output == await solo([*history, 70, 71], 2)


@pytest.mark.parametrize("page_size", [1, 4])
async def test_a_prompt_that_is_wholly_cached_still_computes_a_token(page_size: int) -> None:
    """A5: twice the same eight tokens, and again while the first runs."""
    prompt = PROMPT[:8]
    alone = await solo(prompt, 5)
    crank = Crank(auto=False)
    async with Harness(page_size=page_size, crank=crank, chunk_tokens=4) as harness:
        first = harness.submit("a", prompt, 5)
        await harness.settle()
        crank.turn()
        await harness.settle()
        beside = harness.submit("b", prompt, 5)
        crank.auto = True
        crank.turn()
        await first.done.wait()
        await beside.done.wait()
        before = harness.scheduler.stats().forwarded_tokens
        again = await harness.run("c", prompt, 1)
        assert harness.scheduler.stats().forwarded_tokens - before >= 1
        for run in (beside, again):
            assert run.cached is not None
            assert run.cached <= 7
        assert first.output == beside.output == alone
        assert again.output == alone[:1]
        await harness.idle()


@pytest.mark.parametrize("page_size", [1, 4])
async def test_identical_prompts_admitted_cold_together_survive_a_third_that_fills_the_pool(page_size: int) -> None:
    """A2: the duplicates of an unfinished request are not freed under its page table."""
    third = list(range(60, 80))
    async with Harness(page_size=page_size, pool_tokens=64, chunk_tokens=4) as harness:
        runs = [harness.submit("a", PROMPT, 8), harness.submit("b", PROMPT, 8), harness.submit("c", third, 8)]
        for run in runs:
            await run.done.wait()
        assert runs[0].output == runs[1].output == await solo(PROMPT, 8)
        assert runs[2].output == await solo(third, 8)
        await harness.idle()


@pytest.mark.parametrize("end", ["length", "eos", "stop string", "cancel"])
async def test_the_last_steps_slot_is_freed_once(end: str) -> None:
    """A10: overlap on, page 1, chunk 4, 200 tokens."""
    script = {"requests": {"a": {"tokens": [65] * 199}}} if end == "eos" else {}
    async with Harness(script, chunk_tokens=4) as harness:
        run = harness.submit("a", PROMPT, 200, stop_after=200 if end == "stop string" else None)
        if end == "cancel":
            while len(run.output) < 100:
                await harness.settle(1)
            harness.scheduler.cancel("a")
            run.silent = True
        else:
            await run.done.wait()
            assert run.outcomes[0].completion_tokens == 200
        await harness.idle()


async def test_bypass_neither_reads_nor_writes_the_cache() -> None:
    async with Harness() as harness:
        await harness.run("a", PROMPT, 4, bypass=True)
        assert harness.scheduler.stats().nodes == 0
        await harness.run("b", PROMPT, 4)
        run = await harness.run("c", PROMPT, 4, bypass=True)
        assert run.cached == 0


async def test_namespaces_share_nothing() -> None:
    async with Harness() as harness:
        await harness.run("a", PROMPT, 4, namespace=b"one")
        assert (await harness.run("b", PROMPT, 4, namespace=b"two")).cached == 0
        assert (await harness.run("c", PROMPT, 4, namespace=b"one")).cached == len(PROMPT) - 1


async def test_a_flush_frees_every_page_and_what_began_before_it_is_not_cached() -> None:
    crank = Crank(auto=False)
    async with Harness(crank=crank, chunk_tokens=4) as harness:
        run = harness.submit("a", PROMPT, 4)
        await harness.settle()
        crank.turn()
        await harness.settle()
        harness.scheduler.flush()
        crank.auto = True
        crank.turn()
        await run.done.wait()
        await harness.idle()
        assert run.output == await solo(PROMPT, 4)
        stats = harness.scheduler.stats()
        assert stats.pages_free == stats.pages_total


async def test_numbers_that_are_not_finite_end_that_request_alone_and_leave_nothing_cached() -> None:
    script = {"requests": {"bad": {"nan_at": 2}}}
    async with Harness(script, chunk_tokens=4) as harness:
        bad = harness.submit("bad", PROMPT, 9)
        good = harness.submit("good", [99, *PROMPT], 9)
        await bad.done.wait()
        await good.done.wait()
        assert len(bad.output) == 2
        assert type(bad.error).__name__ == "NotFiniteError"
        assert good.output == await solo([99, *PROMPT], 9)
        await harness.idle()
        assert harness.scheduler.ledger.cache.match_prefix(PROMPT).cached_len == 0
