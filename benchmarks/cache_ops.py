"""What the prefix cache costs: CPU time of a request's whole life in it, of an eviction, and memory.

Three workloads of random int32 tokens (vocabulary 128,000), each at pages 1 and 16. Each request matches and locks
``prompt[:-1]`` and gathers its pages, takes pages for the rest, shares the prompt once it is computed, and at its end
shares prompt and output, gives duplicates back and unlocks; every call is one crossing from Python, none serves two
requests.

* chat: a system prompt of 1,024 tokens, 500 conversations in random order per turn, 8 turns, each adding 40-80 user
  and 90-150 output tokens; a pool of 2**21 tokens;
* tree: 64 prefixes of 512 tokens x 64 branches in random order, each 128 prompt and 384 output tokens more;
* zipf: 20,000 requests over 2,000 prefixes of 2,000 tokens with weight 1/rank, each 64 prompt and 64 output tokens
  more; a pool of 200,000 tokens, evicting as needed.

Evictions: trees of leaves of 16 tokens under the root, page 16; each ``evict(1)`` removes a leaf. Metadata: the
growth of resident memory while the largest of these trees, and the chat workload, fill an empty cache, for each token
cached.

Every workload runs under the default eviction policy and under lru. The tests' oracle runs the same workloads in the
same run (on a part of the requests), and has to hit the same tokens. It is written in Python to be plain, not to be
fast: its ratio says nothing of other caches. The further columns are not measured here: they are what was measured of
other systems' real code with stub pools, once, on a shared 2-core AVX-512 machine; trust their ratios.

``--json FILE`` writes a flat object: ``chat_us_p1``, ``chat_us_p16``, ``tree_us_p1``, ``tree_us_p16``,
``zipf_us_p1``, ``zipf_us_p16`` (CPU microseconds a request, under the default policy), the same with ``lru_`` or
``oracle_`` in front, ``chat_hit_p1`` ... (hit rates), ``evict1_us_1k``, ``_10k``, ``_100k``, ``_1m`` and
``evict1000_us_...`` (microseconds a call, median), ``bytes_per_token`` (the larger of ``bytes_per_token_leaves`` and
``bytes_per_token_chat``).

Run: ``python benchmarks/cache_ops.py`` (about two minutes).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from machine import describe, table
from pool import Pool

from kvcache import POLICIES, RadixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

VOCABULARY = 128_000
ROW = 1 << 15  # entries of a page table's row: the longest request, at page 1
BATCH = 250  # requests between two looks at the clock

FIELD = {
    "chat": ("270 / 284", "163 / 129", "235 / 229", "4,615 / 358", "4.2 / 4.6"),
    "tree": ("82 / 95", "86 / 79", "101 / 123", "2,623 / 248", "1.6 / 2.0"),
    "zipf": ("105 / 111", "121 / 132", "129 / 128", "- / 480", "2.3 / 2.8"),
}
FIELD_NAMES = ("SGLang Python", "SGLang Rust", "mini-sglang", "vLLM", "TGI Rust, no Python")
FIELD_EVICT1 = {
    "1k": ("94", "46", "154", "1.1", "0.09"),
    "10k": ("2,411", "197", "2,096", "1.2", "0.07"),
    "100k": ("71,307", "2,986", "67,464", "2.0", "0.07"),
    "1m": ("-", "-", "-", "-", "-"),
}


@dataclass(frozen=True)
class Work:
    """One request: all its tokens, and how many of them are prompt."""

    ids: np.ndarray
    prompt: int


class Fused:
    """Lives requests through the cache's fused calls, as the scheduler's ledger does."""

    def __init__(self, page: int, pool: Pool, policy: str = POLICIES[0]) -> None:
        self.cache = RadixCache(page, policy=policy)
        self.page = page
        self.pool = pool
        self.row = np.zeros(ROW, dtype=np.int32)
        self.asked = self.hit = 0

    def live(self, work: Work) -> None:
        """One request's life."""
        cache, pool, row, page, ids = self.cache, self.pool, self.row, self.page, work.ids
        handle = cache.admit(ids[: work.prompt - 1], row)
        cached = handle.cached_len
        self.asked += work.prompt
        self.hit += cached
        first, last = cached // page, -(-len(ids) // page)
        if last - first > pool.free:
            pool.give(cache.evict_pages(last - first - pool.free))
        row[first:last] = pool.take(last - first)
        pages = cache.commit(ids[: work.prompt], row, handle)
        if len(pages):
            pool.give(pages)
        pages = cache.finish(ids, row, handle)
        if len(pages):
            pool.give(pages)
        kept = len(ids) // page
        if last > kept:
            pool.give(row[kept:last])


class Plain:
    """Lives the same requests through the interface's single calls, on the tests' plain Python tree."""

    def __init__(self, page: int, pool: Pool) -> None:
        from tests.kvcache.oracle import OracleCache  # noqa: PLC0415 - the tests' own, found once the path is set

        self.cache = OracleCache(page)
        self.page = page
        self.pool = pool
        self.offsets = np.arange(page, dtype=np.int32)
        self.asked = self.hit = 0

    def live(self, work: Work) -> None:
        """One request's life."""
        cache, pool, page, ids = self.cache, self.pool, self.page, work.ids
        found = cache.match_prefix(ids[: work.prompt - 1])
        cache.lock_handle(found.handle)
        slots = found.handle.get_matched_indices()
        self.asked += work.prompt
        self.hit += found.cached_len
        last = -(-len(ids) // page)
        need = last - found.cached_len // page
        if need > pool.free:
            pool.give(cache.evict((need - pool.free) * page)[::page] // page)
        taken = (pool.take(need)[:, None] * page + self.offsets).ravel()
        slots = np.concatenate((slots, taken))
        first = cache.insert_prefix(ids[: work.prompt], slots[: work.prompt])
        cache.lock_handle(first.handle)
        cache.lock_handle(found.handle, unlock=True)
        duplicates = slots[found.cached_len : first.cached_len]
        if len(duplicates):
            slots[: first.cached_len] = first.handle.get_matched_indices()[: first.cached_len]
            pool.give(duplicates[::page] // page)
        whole = cache.insert_prefix(ids, slots[: len(ids)])
        pool.give(slots[first.handle.cached_len : whole.cached_len : page] // page)
        cache.lock_handle(first.handle, unlock=True)
        kept = len(ids) // page * page
        if last * page > kept:
            pool.give(slots[kept::page] // page)


def chat(random: np.random.Generator, conversations: int) -> Iterator[Work]:
    """See the module's docstring."""
    system = tokens(random, 1024)
    history = [system] * conversations
    for _ in range(8):
        for which in random.permutation(conversations):
            prompt = np.concatenate((history[which], tokens(random, int(random.integers(40, 81)))))
            history[which] = np.concatenate((prompt, tokens(random, int(random.integers(90, 151)))))
            yield Work(history[which], len(prompt))


def tree(random: np.random.Generator, prefixes: int) -> Iterator[Work]:
    """See the module's docstring."""
    stems = [tokens(random, 512) for _ in range(prefixes)]
    for which in random.permutation(np.repeat(np.arange(prefixes), 64)):
        yield Work(np.concatenate((stems[which], tokens(random, 128 + 384))), 512 + 128)


def zipf(random: np.random.Generator, requests: int) -> Iterator[Work]:
    """See the module's docstring."""
    stems = [tokens(random, 2000) for _ in range(2000)]
    weights = 1 / np.arange(1, 2001)
    for which in random.choice(2000, size=requests, p=weights / weights.sum()):
        yield Work(np.concatenate((stems[which], tokens(random, 64 + 64))), 2000 + 64)


def tokens(random: np.random.Generator, count: int) -> np.ndarray:
    """Random ids."""
    return random.integers(0, VOCABULARY, count, dtype=np.int32)


# Of each workload: its requests, its pool in tokens, and how much of it the oracle runs.
WORKLOADS: dict[str, tuple[Callable[[np.random.Generator, int], Iterator[Work]], int, int, int]] = {
    "chat": (chat, 1 << 21, 500, 100),
    "tree": (tree, 1 << 22, 64, 12),
    "zipf": (zipf, 200_000, 20_000, 1_500),
}


def run(lives: Fused | Plain, works: Iterator[Work]) -> float:
    """CPU microseconds for each request, what makes the requests left out."""
    spent = count = 0
    gc.disable()
    while batch := [work for work, _ in zip(works, range(BATCH), strict=False)]:
        start = time.thread_time_ns()
        for work in batch:
            lives.live(work)
        spent += time.thread_time_ns() - start
        count += len(batch)
        gc.collect()
    gc.enable()
    lives.cache.check_integrity()
    return spent / count / 1000


def workloads(repeats: int) -> dict[str, float]:
    """Every workload on both trees."""
    figures: dict[str, float] = {}
    for name, (make, pool_tokens, size, small) in WORKLOADS.items():
        for page in (1, 16):
            for prefix, policy in (("", POLICIES[0]), ("lru_", "lru")):
                runs = []
                for _ in range(repeats):
                    lives = Fused(page, Pool(pool_tokens // page), policy)
                    runs.append(run(lives, make(np.random.default_rng(7), size)))
                figures[f"{prefix}{name}_us_p{page}"] = statistics.median(runs)
                figures[f"{prefix}{name}_hit_p{page}"] = lives.hit / lives.asked
            plain = Plain(page, Pool(pool_tokens // page))
            figures[f"oracle_{name}_us_p{page}"] = run(plain, make(np.random.default_rng(7), small))
            fused = Fused(page, Pool(pool_tokens // page), "lru")
            run(fused, make(np.random.default_rng(7), small))
            if fused.hit != plain.hit:
                raise RuntimeError(f"{name} at page {page}: {fused.hit} tokens hit, {plain.hit} in the oracle")
    return figures


def leaves(count: int) -> RadixCache:
    """A tree of ``count`` leaves of 16 tokens under the root."""
    cache = RadixCache(16)
    ids = np.zeros(16, dtype=np.int32)
    offsets = np.arange(16, dtype=np.int32)
    for i in range(count):
        ids[0], ids[1] = i & 0xFFFF, i >> 16
        cache.insert_prefix(ids, offsets + 16 * i)
    return cache


def evictions() -> dict[str, float]:
    """Medians of single calls, in microseconds."""
    figures = {}
    for label, count in (("1k", 1_000), ("10k", 10_000), ("100k", 100_000), ("1m", 1_000_000)):
        cache = leaves(count)
        figures[f"evict1_us_{label}"] = _median_call(lambda cache=cache: cache.evict(1), min(500, count // 2))
        if count >= 10_000:
            calls = min(50, count // 2000)
            figures[f"evict1000_us_{label}"] = _median_call(lambda cache=cache: cache.evict(16_000), calls)
    return figures


def _median_call(call: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - start)
    return statistics.median(taken) / 1000


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def metadata(what: str) -> float:
    """Growth of resident memory for each cached token; meant for a fresh process."""
    pool = Pool(1 << 17)
    lives = Fused(16, pool)
    if what == "chat":
        works = list(chat(np.random.default_rng(7), 500))
        gc.collect()
        before = resident()
        for work in works:
            lives.live(work)
        cache = lives.cache
    else:
        before = resident()
        cache = leaves(1_000_000)
    return (resident() - before) / cache.size_info.total_size


def main() -> None:
    """Runs everything and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each workload; medians are printed")
    parser.add_argument("--metadata", choices=["chat", "leaves"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.metadata:
        print(metadata(options.metadata))
        return
    print(describe(), flush=True)
    figures: dict[str, Any] = workloads(options.repeats) | evictions()
    for what in ("chat", "leaves"):
        child = [sys.executable, __file__, "--metadata", what]
        figures[f"bytes_per_token_{what}"] = float(subprocess.run(child, capture_output=True, check=True).stdout)
    figures["bytes_per_token"] = max(figures["bytes_per_token_chat"], figures["bytes_per_token_leaves"])
    rows = []
    for name in WORKLOADS:
        ours, lru, plain = ([figures[f"{who}{name}_us_p{page}"] for page in (1, 16)] for who in ("", "lru_", "oracle_"))
        ratio = " / ".join(f"{p / o:.0f}x" for o, p in zip(lru, plain, strict=True))
        pairs = [" / ".join(f"{us:.1f}" for us in both) for both in (ours, lru, plain)]
        hits = f"{figures[f'{name}_hit_p1']:.3f} / {figures[f'lru_{name}_hit_p1']:.3f}"
        rows.append([name, *pairs[:2], hits, pairs[2], ratio, *FIELD[name]])
    print(
        "\nCPU us a request, page 1 / page 16 (to the right of the ratio: figures measured elsewhere, not in this run)"
    )
    print(table(["", POLICIES[0], "lru", "hits, page 1", "oracle, lru", "to lru", *FIELD_NAMES], rows))
    rows = []
    for label, field_figures in FIELD_EVICT1.items():
        thousand = figures.get(f"evict1000_us_{label}")
        cells = [f"{figures[f'evict1_us_{label}']:.2f}", "-" if thousand is None else f"{thousand:.1f}"]
        rows.append([f"{label} leaves", *cells, *field_figures])
    print("\none eviction, median us (right: evicting 1, measured elsewhere)")
    print(table(["", "evict 1", "evict 1,000", *FIELD_NAMES], rows))
    print(
        f"\nmetadata: {figures['bytes_per_token_chat']:.1f} bytes a cached token after chat, "
        f"{figures['bytes_per_token_leaves']:.1f} in a million leaves of 16 tokens"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
