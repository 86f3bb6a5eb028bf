from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvcache import RadixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def constant_hash(data: bytes) -> int:
    del data
    return 7


@pytest.fixture(scope="module", params=["hashes differ", "all hashes collide"])
def page_hashing(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs what uses it twice: identity must be the tokens, whatever the hash says (A9)."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "all hashes collide":
            patch.setattr("kvcache.node.page_hash", constant_hash)
        yield request.param


@pytest.fixture
def make_cache() -> Iterator[Callable[[int], RadixCache]]:
    """Makes radix caches, and proves the integrity of each once the test is over."""
    made: list[RadixCache] = []

    def make(page_size: int) -> RadixCache:
        made.append(RadixCache(page_size))
        return made[-1]

    yield make
    for cache in made:
        cache.check_integrity()
