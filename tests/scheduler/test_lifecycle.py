"""How requests end: by themselves, by abort, by cancel, by faults; and that each end is told exactly once."""

from __future__ import annotations

import pytest

from engine.base import EngineError
from scheduler.errors import DuplicateRequestError, StepFailedError, UnavailableError
from scheduler.request import Reason
from tests.scheduler.harness import Crank, Harness, solo

PROMPT = list(range(40, 57))


async def test_a_cancel_between_launching_and_collecting_the_last_chunk_publishes_nothing() -> None:
    """B1."""
    crank = Crank(auto=False)
    async with Harness(crank=crank) as harness:
        run = harness.submit("a", PROMPT, 8)
        await harness.settle()
        assert ("launch", 1) in harness.events
        harness.scheduler.cancel("a")
        run.silent = True
        crank.auto = True
        crank.turn()
        await harness.idle()
        assert run.output == []


async def test_five_hundred_cancels_at_the_first_token_hurt_no_neighbour() -> None:
    """B2: max_tokens 1, cancelled at once, beside eight neighbours; no slot has two owners at any step."""
    neighbours = {f"n{i}": [33 + i, *PROMPT] for i in range(8)}
    crank = Crank(auto=False)
    async with Harness(crank=crank, pool_tokens=2048) as harness:
        runs = {name: harness.submit(name, p, 560) for name, p in neighbours.items()}
        for i in range(500):
            victim = harness.submit(f"v{i}", [100, *PROMPT], 1)
            await harness.settle(4)
            crank.turn()
            await harness.settle(4)
            harness.scheduler.cancel(f"v{i}")
            assert victim.outcomes.keys() <= {0}
        crank.auto = True
        crank.turn()
        for name, run in runs.items():
            await run.done.wait()
            assert run.output == await solo(neighbours[name], 560)
        await harness.idle()


async def test_abort_finishes_every_continuation_that_still_runs() -> None:
    crank = Crank(auto=False)
    async with Harness(crank=crank) as harness:
        run = harness.submit("a", PROMPT, 50, n=3)
        for _ in range(4):
            await harness.settle()
            crank.turn()
        assert not run.done.is_set()
        assert harness.scheduler.abort("a")
        assert {outcome.reason for outcome in run.outcomes.values()} == {Reason.ABORTED}
        assert len(run.outcomes) == 3
        assert not harness.scheduler.abort("a")
        crank.auto = True
        crank.turn()
        await harness.idle()


async def test_continuations_end_apart_each_exactly_once() -> None:
    """C6: n = 3, of lengths 1, 4 and 9."""
    script = {"requests": {"a": {"tokens": [[], [65] * 3, [65] * 8]}}}
    script["requests"]["a"]["tokens"][0] = [257]
    async with Harness(script) as harness:
        run = await harness.run("a", PROMPT, 20, n=3)
        assert {i: o.completion_tokens for i, o in run.outcomes.items()} == {0: 1, 1: 4, 2: 9}
        await harness.idle()


async def test_continuations_share_one_prefill() -> None:
    async with Harness() as harness:
        run = await harness.run("a", PROMPT, 4, n=4, temperature=1.0, seed=5)
        assert harness.scheduler.stats().forwarded_tokens == len(PROMPT) + 3 + 3 * (1 + 3)
        assert len({tuple(tokens) for tokens in run.tokens.values()}) == 4
        await harness.idle()


async def test_a_request_id_is_free_again_once_its_request_ended() -> None:
    async with Harness() as harness:
        first = harness.submit("a", PROMPT, 4)
        with pytest.raises(DuplicateRequestError):
            harness.submit("a", PROMPT, 4)
        await first.done.wait()
        await harness.run("a", PROMPT, 4)


async def test_prompt_and_output_end_with_the_context() -> None:
    async with Harness(context=20) as harness:
        run = await harness.run("a", PROMPT, 100)
        assert run.reason is Reason.LENGTH
        assert len(run.output) == 3
        with pytest.raises(ValueError, match="context"):
            harness.submit("b", list(range(40, 60)), 1)
        with pytest.raises(ValueError, match="context"):
            harness.submit("c", [], 1)


async def test_an_engine_exception_fails_the_requests_of_its_step_alone() -> None:
    script = {"requests": {"bad": {"fail_at": 2}}}
    async with Harness(script) as harness:
        bad, beside = harness.submit("bad", PROMPT, 9), harness.submit("beside", [98, *PROMPT], 9)
        await bad.done.wait()
        await beside.done.wait()
        assert isinstance(bad.error, StepFailedError)
        assert isinstance(beside.error, StepFailedError)
        assert harness.scheduler.ledger.cache.match_prefix(PROMPT).cached_len == 0
        after = await harness.run("after", PROMPT, 9)
        assert after.output == await solo(PROMPT, 9)
        await harness.idle()


async def test_a_lost_device_fails_everything_and_ends_the_loop() -> None:
    crank = Crank(auto=False)
    harness = Harness({"hang_at": 2}, crank=crank)
    async with harness:
        run = harness.submit("a", PROMPT, 9)
        waiting = harness.submit("b", PROMPT, 9)
        await harness.settle()
        harness.engine.close()
        await run.done.wait()
        await waiting.done.wait()
        assert isinstance(run.error, UnavailableError)
        assert isinstance(waiting.error, UnavailableError)
        with pytest.raises(UnavailableError):
            harness.submit("c", PROMPT, 9)
    assert isinstance(harness.failure, EngineError)


async def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    async with Harness() as harness:
        run = harness.submit("a", PROMPT, 9)
        harness.scheduler.close_admission()
        with pytest.raises(UnavailableError):
            harness.submit("b", PROMPT, 9)
        await run.done.wait()
        assert len(run.output) == 9
        await harness.idle()


async def test_usage_counts_a_prompt_of_three_chunks_and_one_token_exactly() -> None:
    """C5."""
    async with Harness(chunk_tokens=6) as harness:
        run = await harness.run("a", PROMPT, 1)
        assert run.outcomes[0].prompt_tokens == 17
        assert run.outcomes[0].completion_tokens == 1
        assert run.outcomes[0].cached_tokens == 0


async def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    async with Harness(chunk_tokens=4) as harness:
        stream = harness.submit("stream", PROMPT, 200)
        while not stream.output:
            await harness.settle(1)
        before = len(stream.output)
        long = harness.submit("long", list(range(33, 120)) * 4, 1)
        await long.done.wait()
        # 348 tokens in chunks of 4 are 87 steps, and each gave the stream a token.
        assert len(stream.output) - before >= 85
        await stream.done.wait()
        await harness.idle()
