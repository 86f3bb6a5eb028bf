"""What share of real traffic's input tokens each eviction policy finds in the cache, beside the limit of any.

Replays the two Mooncake traces (one hour of a production chat service, and a synthetic one with more sharing) through
the real cache at page 16: each ``hash_id`` stands for 512 fixed tokens, a request's ids are cut to its
``input_length``, at least one token is always computed, and outputs are not inserted, since the traces do not hold
them. A request locks what it found, evicts what it needs, inserts its prompt and unlocks; one that does not fit the
pool inserts nothing. A hit rate is hit tokens over input tokens.

The limit is clairvoyant: leaf-only eviction, in blocks of 512, of what is needed furthest in the future.

The default policy has one setting for all six cells. It was chosen on the first half of each trace; the second half's
rate, from the cache as the first half left it, is printed beside the whole.

``--json FILE`` writes a flat object: ``conversation_1000``, ``conversation_4000``, ``conversation_16000``,
``synthetic_1000``, ... (the default policy over the whole trace, in percent), the same with ``_second_half`` behind,
and for every policy and the limit with its name in front: ``lru_conversation_1000``,
``clairvoyant_conversation_1000``.

Run: ``python benchmarks/hit_rate.py [--trace FILE ...]``. The traces are in the Mooncake project's repository
(kvcache-ai/Mooncake, FAST25-release/traces, Apache-2.0); without ``--trace`` they are looked for in
``../shared/data``.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from machine import describe, table
from pool import Pool

from kvcache import POLICIES, RadixCache

BLOCK = 512
PAGE = 16
POOLS = (1_000, 4_000, 16_000)
DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
TRACES = [DATA / f"mooncake_{name}_trace.jsonl" for name in ("conversation", "synthetic")]


@dataclass(frozen=True)
class Request:
    """One line of a trace."""

    blocks: list[int]
    length: int
    output: int


@dataclass(frozen=True)
class Rate:
    """Percent of input tokens found, over the whole trace and over its second half."""

    whole: float
    second_half: float


def read(path: Path) -> list[Request]:
    """Reads a trace."""
    lines = path.read_text().splitlines()
    return [Request(line["hash_ids"], line["input_length"], line["output_length"]) for line in map(json.loads, lines)]


def rate(requests: list[Request], found: list[int]) -> Rate:
    """Percent of the requests' tokens that were found."""
    lengths = np.array([request.length for request in requests])
    hits, half = np.array(found), len(requests) // 2
    return Rate(100 * hits.sum() / lengths.sum(), 100 * hits[half:].sum() / lengths[half:].sum())


def replay(requests: list[Request], pool: int, policy: str) -> Rate:
    """Runs a trace through the real cache, with a pool of ``pool`` blocks."""
    cache = RadixCache(PAGE, policy=policy)
    pages = Pool(pool * BLOCK // PAGE)
    row = np.zeros(1 << 16, dtype=np.int32)
    offsets = np.arange(BLOCK, dtype=np.int32)
    found = []
    for request in requests:
        blocks = np.array(request.blocks, dtype=np.int32)
        ids = (blocks[:, None] * BLOCK + offsets).ravel()[: request.length]
        handle = cache.admit(ids[:-1], row)
        first, last = handle.cached_len // PAGE, len(ids) // PAGE
        found.append(handle.cached_len)
        need = last - first
        if need > pages.free + cache.evictable_pages:
            cache.unlock_pages(handle)
            continue
        if need > pages.free:
            pages.give(cache.evict_pages(need - pages.free))
        row[first:last] = pages.take(need)
        pages.give(cache.finish(ids, row, handle, output_len=request.output))
    cache.check_integrity()
    return rate(requests, found)


def clairvoyant(requests: list[Request], pool: int) -> Rate:
    """The limit: evicts the leaf that is needed furthest in the future, in blocks."""
    never = len(requests)
    next_use: list[list[int]] = []
    upcoming: dict[int, int] = {}
    for i in range(len(requests) - 1, -1, -1):
        next_use.append([upcoming.get(block, never) for block in requests[i].blocks])
        upcoming.update(dict.fromkeys(requests[i].blocks, i))
    next_use.reverse()
    due: dict[int, int] = {}  # cached blocks, and when each is needed next
    children: dict[int, int] = {}
    parents: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    found = []
    for i, request in enumerate(requests):
        hit = 0
        while hit < len(request.blocks) and request.blocks[hit] in due:
            hit += 1
        found.append(min(hit * BLOCK, (request.length - 1) // PAGE * PAGE))
        if len(request.blocks) > pool:
            continue
        for position, (block, use) in enumerate(zip(request.blocks, next_use[i], strict=True)):
            if block not in due and position:
                parents[block] = request.blocks[position - 1]
                children[parents[block]] = children.get(parents[block], 0) + 1
            due[block] = use
            heapq.heappush(heap, (-use, block))
        while len(due) > pool:
            use, block = heapq.heappop(heap)
            if due.get(block) != -use or children.get(block):
                continue
            del due[block]
            parent = parents.pop(block, None)
            if parent is not None:
                children[parent] -= 1
                if not children[parent] and parent in due:
                    heapq.heappush(heap, (-due[parent], parent))
    return rate(requests, found)


def main() -> None:
    """Runs everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", metavar="FILE", help="a trace; may be given again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="only these; may be given again")
    options = parser.parse_args()
    paths = options.trace or TRACES
    policies = options.policy or list(POLICIES)
    print(describe(), flush=True)
    figures: dict[str, float] = {}
    rows = []
    start = time.monotonic()
    for path in paths:
        name = path.stem.removeprefix("mooncake_").removesuffix("_trace")
        requests = read(path)
        for pool in POOLS:
            rates = {policy: replay(requests, pool, policy) for policy in policies}
            rates["clairvoyant"] = clairvoyant(requests, pool)
            for policy, one in rates.items():
                figures[f"{policy}_{name}_{pool}"] = one.whole
                if policy == POLICIES[0]:
                    figures[f"{name}_{pool}"] = one.whole
                    figures[f"{name}_{pool}_second_half"] = one.second_half
            rows.append([name, f"{pool:,}", *(f"{one.whole:.1f} ({one.second_half:.1f})" for one in rates.values())])
    print(f"hit rate in percent, whole trace (second half); {POLICIES[0]} is the default")
    print(table(["trace", "blocks", *policies, "clairvoyant"], rows))
    print(f"{time.monotonic() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
