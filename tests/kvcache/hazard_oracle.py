"""The oracle of the ``hazard`` policy: the same formulas in plain Python, in the same order, so that every sum rounds
alike and every choice is equal.

What is known of a prefix is kept by its tokens, not by a hash; which leaves may go is found by looking at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvcache import Handle, InsertResult, Int32Array, NotEnoughEvictableError
from kvcache.arguments import pages_up
from tests.kvcache.oracle import EMPTY, Node, OracleCache, OracleHandle

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

EPOCH = 8
STARTS = [0, 8, 16, 24, 32, 40, 48, 64, 88, 128, 184, 256, 360, 512, 720, 1024, 1448, 2048]
BUCKETS = len(STARTS)
DURATIONS = [*(end - start for start, end in pairwise(STARTS)), STARTS[-1]]
EPOCHS = STARTS[-1] // EPOCH + 4
LEVELS, KINDS = 5, 375
RUN_TOKENS = 512
TOKENS_FOR_GHOST = 16
MAX_DIVISIONS = 8
UNKNOWN = 1 << 62
START_TABLE = Path(__file__).parents[2] / "csrc" / "radix_hazard_start.h"


@dataclass(frozen=True)
class Past:
    """What the pages of a node have been through."""

    last: int = 0
    kind: int = 0
    uses: int = 0
    runs: int = 0


UNUSED = Past()


def use_level(uses: int) -> int:
    return sum(uses >= limit for limit in (2, 3, 5, 9))


def kind_of(uses: int, fresh: int, output: int, gap: int | None) -> int:
    known_before = 0 if gap is None else 1 + sum(gap >= limit for limit in (64, 256, 1024))
    fresh_level = sum(fresh > limit for limit in (512, 2048, 4096, 16384))
    return ((use_level(uses) * 5 + fresh_level) * 3 + sum(output >= limit for limit in (64, 128))) * 5 + known_before


def bucket_of(age: int) -> int:
    return max(bucket for bucket in range(BUCKETS) if age >= STARTS[bucket])


def ratio(reused: float, exposed: float, prior: float, mass: float) -> float:
    return (reused + mass * prior) / (max(reused, exposed) + mass)


def start_of(code: int) -> float:
    """A mass of the start table."""
    return (code if code < 128 else (128 + code % 128) << (code // 128 - 1)) / 64


def in_order(numbers: Iterable[float]) -> float:
    """Their sum, one by one."""
    total = 0.0
    for number in numbers:
        total += number
    return total


class Hazards:
    """Sums are lists by bucket of arrays by kind: float64[KINDS]."""

    def __init__(self, *, learned: bool = True) -> None:
        self.now = self.next_rank = 0
        self.reused = [np.zeros(KINDS) for _ in STARTS]
        self.exposed = [np.zeros(KINDS) for _ in STARTS]
        self.entered = [np.zeros(KINDS) for _ in range(EPOCHS)]
        rows = re.findall(r'\{(\d+), "(\w+)", "(\w+)"\}', START_TABLE.read_text() if learned else "")
        for kind, exposed, reused in rows:
            for bucket in range(BUCKETS):
                digits = slice(3 * bucket, 3 * bucket + 3)
                self.exposed[bucket][int(kind)] = start_of(int(exposed[digits], 16))
                self.reused[bucket][int(kind)] = start_of(int(reused[digits], 16))
        self.rank()

    def leave(self, past: Past, mass: float) -> None:
        self.reused[bucket_of(self.now - past.last)][past.kind] += mass
        if self.now // EPOCH - past.last // EPOCH < EPOCHS - 1:
            self.entered[past.last // EPOCH % EPOCHS][past.kind] -= mass

    def enter(self, past: Past, mass: float) -> None:
        self.exposed[0][past.kind] += mass
        self.entered[self.now // EPOCH % EPOCHS][past.kind] += mass

    def tick(self) -> bool:
        self.now += 1
        if self.now % EPOCH:
            return False
        epoch = self.now // EPOCH
        for bucket in range(1, BUCKETS):
            passed = STARTS[bucket] // EPOCH + 1
            if epoch >= passed:
                self.exposed[bucket] += self.entered[(epoch - passed) % EPOCHS]
        self.entered[epoch % EPOCHS][:] = 0
        return True

    def hazards(self, bucket: int) -> npt.NDArray[np.float64]:
        reused, exposed, length = self.reused[bucket], self.exposed[bucket], DURATIONS[bucket]
        sums = [(in_order(r), in_order(e)) for r, e in zip(reused.reshape(5, -1), exposed.reshape(5, -1), strict=True)]
        start = min(0.5, 0.2 * length / (STARTS[bucket] + length / 2))
        of_all = ratio(in_order(r for r, _ in sums), in_order(e for _, e in sums), start, 10)
        of_level = np.repeat([ratio(r, e, of_all, 50) for r, e in sums], KINDS // LEVELS)
        return np.minimum(0.95, (reused + 5 * of_level) / (np.maximum(reused, exposed) + 5))

    def rank(self) -> None:
        self.next_rank = self.now + 512
        hazards = [self.hazards(bucket) for bucket in range(BUCKETS)]
        self.worths = np.stack([self.worth(hazards, bucket) for bucket in range(BUCKETS)], axis=1).astype(np.float32)

    def worth(self, hazards: list[npt.NDArray[np.float64]], first: int) -> npt.NDArray[np.float64]:
        left, reuse, time, best = np.ones(KINDS), np.zeros(KINDS), np.zeros(KINDS), np.zeros(KINDS)
        for bucket in range(first, BUCKETS):
            reuse += left * hazards[bucket]
            time += left * (DURATIONS[bucket] * (0.75 if bucket == first else 1)) * (1 - hazards[bucket] / 2)
            left *= 1 - hazards[bucket]
            best = np.maximum(best, reuse / time)
        return best


class HazardOracle(OracleCache):
    """See ``RadixCache`` with policy ``hazard``."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size, policy="hazard")
        self.hazards = Hazards()
        self.pasts: dict[Node, Past] = {}
        self.lists: dict[tuple[int, int], list[Node]] = {}
        self.ghosts: dict[bytes, Past] = {}  # the oldest first
        self.ghost_limit = 0
        self.run = max(1, RUN_TOKENS // page_size) * page_size
        self.within_commit = False

    # What is known of each node.

    def past(self, node: Node) -> Past:
        return self.pasts.get(node, UNUSED)

    def split(self, node: Node, at: int) -> Node:
        prefix = super().split(node, at)
        self.pasts[prefix] = self.past(node)
        return prefix

    def prefix_key(self, node: Node, end: int) -> bytes:
        """Names the first ``end`` tokens of the path to a node, and its namespace."""
        path = list(node.path_up())
        tokens = np.concatenate([part.tokens for part in path[::-1]])
        return len(path[-2].edge).to_bytes(4, "big") + path[-2].edge + tokens[:end].tobytes()

    def use(self, handle: OracleHandle, matched: bool) -> None:
        """Nothing before the request has ended."""

    def ended(self, node: Node, prompt: int, output: int) -> None:
        """A request ended whose path ended here, or did before its end was cut off."""
        end = next((part for part in node.path_up() if part.attached), self.root)
        path = [part for part in end.path_up() if len(part.tokens)]
        if not path:
            return
        self.unlist_all_but_free()
        self.unlist(end)
        known = next((part.end for part in path if self.past(part).uses), 0)
        fresh = max(prompt - known, 0)
        last = next((self.past(part).last for part in path if self.past(part).uses), None)
        gap = None if last is None else self.hazards.now - last
        while path:
            before = self.past(path[0])
            count = next((n for n, part in enumerate(path) if self.past(part) != before), len(path))
            alike, path = path[:count], path[count:]
            tokens = sum(len(part.tokens) for part in alike)
            uses = min(before.uses + 1, 255)
            runs = min(max(tokens // self.run, 1), 255)
            after = Past(self.hazards.now, kind_of(uses, fresh, output, gap), uses, runs)
            if before.uses:
                self.hazards.leave(before, tokens // self.page_size * self.weight(before))
            self.hazards.enter(after, tokens // self.page_size * self.weight(after))
            self.pasts.update(dict.fromkeys(alike, after))
        if self.hazards.tick():
            self.move_on()

    def weight(self, past: Past) -> float:
        return 1 / (sqrt(past.runs) * (self.run // self.page_size))

    # The order of eviction.

    def free_leaves(self) -> list[Node]:
        locked = self.locked()
        return [node for node in self.nodes() if node not in locked and not node.children]

    def listed(self) -> list[Node]:
        return [node for nodes in self.lists.values() for node in nodes]

    def unlist(self, node: Node) -> None:
        for nodes in self.lists.values():
            if node in nodes:
                nodes.remove(node)

    def unlist_all_but_free(self) -> None:
        free = self.free_leaves()
        for node in self.listed():
            if node not in free:
                self.unlist(node)

    def enlist(self, node: Node) -> None:
        past = self.past(node)
        nodes = self.lists.setdefault((past.kind, bucket_of(self.hazards.now - past.last)), [])
        nodes.insert(0 if nodes and self.past(nodes[0]).last >= past.last else len(nodes), node)

    def keep_lists(self) -> None:
        self.unlist_all_but_free()
        (*new,) = (node for node in self.free_leaves() if node not in self.listed())
        for node in new:
            self.enlist(node)

    def move_on(self) -> None:
        for kind in range(KINDS):
            for bucket in range(BUCKETS - 1):
                nodes = self.lists.get((kind, bucket), [])
                while nodes and self.hazards.now - self.past(nodes[0]).last >= STARTS[bucket + 1]:
                    self.enlist(nodes.pop(0))
        if self.hazards.now >= self.hazards.next_rank:
            self.hazards.rank()

    def evict(self, n: int) -> Int32Array:
        wanted = pages_up(n, self.page_size, "n")
        if wanted > self.size_info.evictable_size:
            raise NotEnoughEvictableError(f"{wanted} tokens to evict")
        freed = [EMPTY]
        while wanted:
            cell = min((cell for cell, nodes in self.lists.items() if nodes), key=self.worth_of_cell)
            leaf = self.lists[cell][0]
            taken, start = min(wanted, len(leaf.tokens)), leaf.end - len(leaf.tokens)
            wanted -= taken
            self.evicted_by_segment[use_level(self.past(leaf).uses)] += taken // self.page_size
            for border in range(leaf.end // self.run * self.run, leaf.end - taken, -self.run):
                self.remember(self.prefix_key(leaf, border), self.past(leaf))
            if start + taken == leaf.end:
                freed += self.cut(leaf)
                self.keep_lists()
            else:
                freed.append(leaf.slots[-taken:])
                leaf.tokens, leaf.slots = leaf.tokens[:-taken], leaf.slots[:-taken]
        return np.concatenate(freed)

    def worth_of_cell(self, cell: tuple[int, int]) -> tuple[float, tuple[int, int]]:
        return float(self.hazards.worths[cell]), cell

    # Ghosts.

    def remember(self, key: bytes, past: Past) -> None:
        self.ghosts.pop(key, None)
        while self.ghosts and len(self.ghosts) >= self.ghost_limit:
            del self.ghosts[next(iter(self.ghosts))]
        if self.ghost_limit:
            self.ghosts[key] = past

    def resume(self, leaf: Node) -> None:
        """Gives a new leaf the past of what had gone, in as many nodes as there are different ones."""
        self.ghost_limit = max(self.ghost_limit, sum(len(node.tokens) for node in self.nodes()) // TOKENS_FOR_GHOST)
        if leaf.parent is not None and len(leaf.parent.tokens) and not self.past(leaf.parent).uses:
            return
        start, found = leaf.end - len(leaf.tokens), list[tuple[int, Past]]()
        for border in range(start // self.run * self.run + self.run, leaf.end + 1, self.run):
            past = self.ghosts.pop(self.prefix_key(leaf, border), None)
            if past is None:
                break
            if found and (past == found[-1][1] or len(found) > MAX_DIVISIONS):
                found[-1] = (border, found[-1][1])
            else:
                found.append((border, past))
        for number, (end, past) in enumerate(found):
            if end == start + len(leaf.tokens) or number == MAX_DIVISIONS:
                self.pasts[leaf] = past
                return
            prefix = self.split(leaf, end - start)
            self.pasts[prefix] = past
            start = end

    # The operations, by those of other policies.

    def insert_prefix(
        self,
        ids: Int32Array | Sequence[int],
        slots: Int32Array | Sequence[int],
        *,
        namespace: bytes = b"",
        priority: int = 0,
    ) -> InsertResult:
        inserted = super().insert_prefix(ids, slots, namespace=namespace, priority=priority)
        handle = inserted.handle
        assert isinstance(handle, OracleHandle)
        if inserted.cached_len < handle.cached_len:
            self.resume(handle.node)
        if not self.within_commit:
            self.ended(handle.node, len(ids), UNKNOWN)
            self.keep_lists()
        return inserted

    def lock_handle(self, handle: Handle, unlock: bool = False) -> Int32Array:
        freed = super().lock_handle(handle, unlock)
        assert isinstance(handle, OracleHandle)
        if self.within_commit:
            return freed
        if unlock and handle.node not in self.locked():
            self.ended(handle.node, handle.cached_len, UNKNOWN)
        self.keep_lists()
        return freed

    def commit(
        self,
        ids: Int32Array,
        row: Int32Array,
        handle: OracleHandle,
        *,
        namespace: bytes = b"",
        finished: bool = False,
        prompt_len: int | None = None,
        output_len: int | None = None,
    ) -> Int32Array:
        self.within_commit = True
        freed = super().commit(ids, row, handle, namespace=namespace, finished=finished)
        self.within_commit = False
        if finished:
            prompt = len(ids) if prompt_len is None else prompt_len
            beyond = UNKNOWN if prompt_len is None else max(len(ids) - prompt, 0)
            self.ended(handle.node, prompt, beyond if output_len is None else output_len)
        self.keep_lists()
        return freed

    def finish(
        self,
        ids: Int32Array,
        row: Int32Array,
        handle: OracleHandle,
        *,
        namespace: bytes = b"",
        prompt_len: int | None = None,
        output_len: int | None = None,
    ) -> Int32Array:
        lengths = {"prompt_len": prompt_len, "output_len": output_len}
        return self.commit(ids, row, handle, namespace=namespace, finished=True, **lengths)

    def reset(self, namespace: bytes | None = None) -> Int32Array:
        freed = super().reset(namespace)
        self.keep_lists()
        return freed

    def discard(self, handle: Handle, keep: int) -> Int32Array:
        freed = super().discard(handle, keep)
        self.keep_lists()
        return freed


def oracle_of(policy: str, page_size: int) -> OracleCache:
    """The oracle of a policy."""
    return HazardOracle(page_size) if policy == "hazard" else OracleCache(page_size, policy=policy)
