from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvcache import RadixCache
from tests.kvcache.oracle import OracleCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache import PrefixCache


@pytest.fixture(params=["hashes differ", "all hashes collide", "oracle"])
def make_cache(request: pytest.FixtureRequest) -> Iterator[Callable[[int], PrefixCache]]:
    """Makes prefix caches, and proves the integrity of each once the test is over.

    Of the fast one there is one whose hashes all collide: identity must be the tokens, whatever the hash says (A9).
    """
    made: list[PrefixCache] = []

    def make(page_size: int) -> PrefixCache:
        if request.param == "oracle":
            made.append(OracleCache(page_size))
        else:
            made.append(RadixCache(page_size, policy="lru", constant_hash=request.param == "all hashes collide"))
        return made[-1]

    yield make
    for cache in made:
        cache.check_integrity()
