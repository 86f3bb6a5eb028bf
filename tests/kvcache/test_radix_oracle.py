"""The fast cache agrees with its oracle: over short runs that hypothesis shrinks, and over long ones that fill it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvcache import POLICIES
from tests.kvcache.comparison import FastAgainstOracle

if TYPE_CHECKING:
    from collections.abc import Callable

every_kind = pytest.mark.parametrize(
    ("policy", "page_size"), [(policy, page_size) for policy in POLICIES for page_size in (1, 4, 16, 64)]
)


@every_kind
def test_the_cache_agrees_with_its_oracle_after_every_step(policy: str, page_size: int):
    run_state_machine_as_test(
        lambda: FastAgainstOracle(policy, page_size),
        settings=settings(max_examples=15, stateful_step_count=40, deadline=None, derandomize=True),
    )


def random_step(run: FastAgainstOracle, rng: np.random.Generator) -> None:
    """One operation, those that fill the cache more often than those that empty it."""
    which, page_size = int(rng.integers(1000)), run.page_size
    prompt = {
        "choices": rng.integers(0, 4, rng.integers(0, 7)).tolist(),
        "tail": int(rng.integers(page_size)),
        "namespace": [b"", b"a"][rng.integers(2)],
        "priority": int(rng.integers(8)),
    }
    held, running = bool(run.held), bool(run.sequences)
    steps: list[tuple[float, bool, Callable[[], None]]] = [
        (3, True, lambda: run.match(**prompt)),
        (4, True, lambda: run.insert(**prompt)),
        (3, len(run.sequences) < 3, lambda: run.admit(**prompt, required=int(rng.integers(12)))),
        (2, running, lambda: run.grow(which, prompt["choices"][:2], prompt["tail"])),
        (3, running, lambda: run.commit(which, 10**6 + which)),
        (3, running, lambda: run.finish(which, 10**6 + which)),
        (2, held, lambda: run.lock(which)),
        (4, held, lambda: run.unlock(which)),
        (3, True, lambda: run.evict(int(rng.integers(5 * page_size)))),
        (0.1, True, lambda: run.reset([None, b"", b"a"][rng.integers(3)])),
        (0.5, held, lambda: run.discard(which, int(rng.integers(5 * page_size)))),
    ]
    weights = np.array([weight * possible for weight, possible, _ in steps])
    steps[rng.choice(len(steps), p=weights / weights.sum())][2]()


@every_kind
def test_the_cache_agrees_with_its_oracle_throughout_a_long_run(policy: str, page_size: int):
    rng = np.random.default_rng(page_size)
    run = FastAgainstOracle(policy, page_size)
    for _ in range(1500):
        random_step(run, rng)
        run.every_cache_proves_its_own_integrity()
        run.all_hold_the_same()
        run.all_handles_and_rows_are_the_same()
        run.what_was_done_is_counted()
    run.teardown()
