"""The oracle of the fast prefix cache: the same promises in the plainest Python that keeps them.

Nothing is counted, indexed or cached: what is locked is found by walking up from every lock, sizes are sums over the
tree, and what goes next is the smallest of all unlocked leaves under an explicit key. Every operation may take time in
proportion to all there is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvcache import (
    Handle,
    InsertResult,
    IntegrityError,
    MatchResult,
    NotEnoughEvictableError,
    PrefixCache,
    SizeInfo,
    fast_compare_key,
)
from kvcache.arguments import as_int32, insertable_arrays, pages_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcache import CacheStats, HotPrefix, Int32Array

EMPTY = np.empty(0, np.int32)


@dataclass(eq=False, repr=False)
class Node:
    """A root, the empty node of a namespace, or a run of whole pages. ``edge`` is what its parent finds it by."""

    parent: Node | None
    edge: bytes
    tokens: Int32Array = field(default_factory=EMPTY.copy)
    slots: Int32Array = field(default_factory=EMPTY.copy)
    children: dict[bytes, Node] = field(default_factory=dict)
    locks: int = 0
    attached: bool = True
    segment: int = 0
    last_use: int = 0

    @property
    def end(self) -> int:
        return sum(len(node.tokens) for node in self.path_up())

    def path_up(self) -> Iterator[Node]:
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        yield self
        for child in list(self.children.values()):
            yield from child.subtree()


class OracleHandle(Handle):
    def __init__(self, cache: OracleCache, node: Node, cached_len: int, priority: int) -> None:
        self.cache, self.node, self.end, self.priority = cache, node, cached_len, priority

    @property
    def cached_len(self) -> int:
        return self.end

    @property
    def attached(self) -> bool:
        return self.node.attached

    def get_matched_indices(self) -> Int32Array:
        self.cache.require_held(self.node)
        return np.concatenate([node.slots for node in self.node.path_up()][::-1])


class OracleCache(PrefixCache):
    """See ``RadixCache``, whose policies it has."""

    def __init__(self, page_size: int, *, policy: str = "lru") -> None:
        super().__init__(page_size)
        self.policy = policy
        self.tick = 0
        self.root = Node(None, b"")
        self.orphans: list[Node] = []
        self.evicted_by_segment: Counter[int] = Counter()

    # What there is.

    def nodes(self) -> list[Node]:
        """All that a match can reach and that holds tokens."""
        return [node for node in self.root.subtree() if len(node.tokens)]

    def locked(self) -> set[Node]:
        everything = [*self.root.subtree(), *self.orphans]
        return {part for node in everything if node.locks for part in node.path_up()}

    def require_held(self, node: Node) -> None:
        if not node.attached and node not in self.locked():
            raise IntegrityError("the cache no longer holds this prefix")

    @property
    def size_info(self) -> SizeInfo:
        locked = self.locked()
        evictable = sum(len(node.tokens) for node in self.nodes() if node not in locked)
        return SizeInfo(evictable, len(self.held_slots()) - evictable)

    @property
    def node_count(self) -> int:
        return len(self.nodes())

    @property
    def namespace_count(self) -> int:
        return len(self.root.children)

    def held_slots(self) -> Int32Array:
        return np.concatenate([EMPTY, *(node.slots for node in [*self.nodes(), *self.orphans])])

    def check_integrity(self) -> None:
        held = self.held_slots()
        if len(np.unique(held)) != len(held):
            raise IntegrityError("a slot is held twice")

    # Matching and inserting.

    def match_prefix(
        self, ids: Int32Array | Sequence[int], *, namespace: bytes = b"", priority: int = 0
    ) -> MatchResult:
        handle = self.walk(self.whole_pages(as_int32(ids, "ids")), namespace, priority)
        self.use(handle, matched=True)
        return MatchResult(handle.cached_len, handle)

    def peek_prefix(self, ids: Int32Array, *, namespace: bytes = b"") -> int:
        return self.walk(self.whole_pages(ids), namespace, 0, split=False).cached_len

    def insert_prefix(
        self,
        ids: Int32Array | Sequence[int],
        slots: Int32Array | Sequence[int],
        *,
        namespace: bytes = b"",
        priority: int = 0,
    ) -> InsertResult:
        new_ids, new_slots = insertable_arrays(ids, slots, self.page_size)
        if len(new_ids) and namespace not in self.root.children:
            self.root.children[namespace] = Node(self.root, namespace)
        handle = self.walk(new_ids, namespace, priority)
        cached_len = handle.cached_len
        if cached_len < len(new_ids):
            above = handle.node if cached_len else self.root.children[namespace]
            tokens = new_ids[cached_len:].copy()
            leaf = Node(above, self.first_page(tokens), tokens, new_slots[cached_len:].copy())
            above.children[leaf.edge] = leaf
            handle = OracleHandle(self, leaf, len(new_ids), priority)
        self.use(handle, matched=False)
        self.settle()
        return InsertResult(cached_len, handle)

    def whole_pages(self, ids: Int32Array) -> Int32Array:
        return ids[: len(ids) // self.page_size * self.page_size]

    def first_page(self, tokens: Int32Array) -> bytes:
        return tokens[: self.page_size].tobytes()

    def walk(self, ids: Int32Array, namespace: bytes, priority: int, split: bool = True) -> OracleHandle:
        """To the end of the longest cached prefix, splitting the node that it ends in unless told not to."""
        node, depth = self.root.children.get(namespace, self.root), 0
        while depth < len(ids) and (child := node.children.get(self.first_page(ids[depth:]))) is not None:
            common = fast_compare_key(child.tokens, ids[depth:]) // self.page_size * self.page_size
            depth += common
            node = child
            if common < len(child.tokens):
                node = self.split(child, common) if split else child
                break
        return OracleHandle(self, node if depth else self.root, depth, priority)

    def split(self, node: Node, at: int) -> Node:
        prefix = Node(node.parent, node.edge, node.tokens[:at], node.slots[:at])
        prefix.segment, prefix.last_use = node.segment, node.last_use
        node.parent.children[node.edge] = prefix
        node.tokens, node.slots = node.tokens[at:], node.slots[at:]
        node.parent, node.edge = prefix, self.first_page(node.tokens)
        prefix.children[node.edge] = node
        return prefix

    # The order of eviction.

    def use(self, handle: OracleHandle, matched: bool) -> None:
        self.tick += 1
        for node in handle.node.path_up():
            node.last_use = self.tick
            if self.policy == "lfu" and matched:
                node.segment = min(node.segment + 1, 255)
            elif self.policy == "slru" and matched:
                node.segment = 1
            elif self.policy == "priority":
                node.segment = max(node.segment, handle.priority)

    def settle(self) -> None:
        """Demotes what is over the share of the protected segment, the oldest first."""
        while self.policy == "slru":
            locked = self.locked()
            unlocked = [node for node in self.nodes() if node not in locked]
            protected = [node for node in unlocked if node.segment == 1]
            if sum(len(node.tokens) for node in protected) * 5 <= sum(len(node.tokens) for node in unlocked) * 4:
                return
            oldest = min(protected, key=self.worth)
            self.tick += 1
            oldest.segment, oldest.last_use = 0, self.tick

    def worth(self, node: Node) -> tuple[int, int, int]:
        return node.segment, node.last_use, -node.end

    def evict(self, n: int) -> Int32Array:
        wanted = pages_up(n, self.page_size, "n")
        if wanted > self.size_info.evictable_size:
            raise NotEnoughEvictableError(f"{wanted} tokens to evict")
        freed = [EMPTY]
        while wanted:
            locked = self.locked()
            leaf = min((n for n in self.nodes() if n not in locked and not n.children), key=self.worth)
            if len(leaf.tokens) > wanted:
                self.split(leaf, len(leaf.tokens) - wanted)
            wanted -= len(leaf.tokens)
            self.evicted_by_segment[leaf.segment] += len(leaf.tokens) // self.page_size
            freed += self.cut(leaf)
        return np.concatenate(freed)

    # Locks, and forgetting on purpose.

    def lock_handle(self, handle: Handle, unlock: bool = False) -> Int32Array:
        if not isinstance(handle, OracleHandle):
            raise TypeError("not a handle of this cache")
        if not unlock:
            self.require_held(handle.node)
            handle.node.locks += 1
            return EMPTY.copy()
        if handle.node.locks == 0:
            raise IntegrityError("a handle that is not locked was unlocked")
        before = self.locked()
        handle.node.locks -= 1
        unlocked = before - self.locked()
        self.tick += 1
        for node in unlocked:
            node.last_use = self.tick
        freed = [node.slots for node in handle.node.path_up() if node in unlocked and not node.attached]
        self.orphans = [node for node in self.orphans if node not in unlocked]
        self.drop_unused_namespaces()
        self.settle()
        return np.concatenate([EMPTY, *freed])

    def cut(self, top: Node) -> list[Int32Array]:
        locked = self.locked()
        del top.parent.children[top.edge]
        gone = list(top.subtree())
        for node in gone:
            node.attached, node.children = False, {}
        self.orphans += [node for node in gone if node in locked]
        self.drop_unused_namespaces()
        return [node.slots for node in gone if node not in locked]

    def drop_unused_namespaces(self) -> None:
        locked = self.locked()
        used = {name: top for name, top in self.root.children.items() if top.children or top in locked}
        self.root.children = used

    def reset(self, namespace: bytes | None = None) -> Int32Array:
        freed = [EMPTY]
        for name, top in list(self.root.children.items()):
            if namespace in (None, name):
                freed += self.cut(top)
        if namespace is None:
            self.root.attached = False
            if self.root in self.locked():
                self.orphans.append(self.root)
            self.root = Node(None, b"")
        return np.concatenate(freed)

    def discard(self, handle: Handle, keep: int) -> Int32Array:
        keep = pages_up(keep, self.page_size, "keep")
        if not isinstance(handle, OracleHandle):
            raise TypeError("not a handle of this cache")
        if not handle.node.attached or keep >= handle.cached_len:
            return EMPTY.copy()
        node = next(node for node in handle.node.path_up() if node.end - len(node.tokens) <= keep)
        start = node.end - len(node.tokens)
        if start < keep:
            self.split(node, keep - start)
        return np.concatenate([EMPTY, *self.cut(node)])

    # The fused calls, by what they are made of.

    def admit(
        self, ids: Int32Array, row: Int32Array, *, namespace: bytes = b"", priority: int = 0, required: int = 0
    ) -> OracleHandle | None:
        found = self.walk(self.whole_pages(ids), namespace, priority, split=False)
        locked, below = self.locked(), found.node.end - found.cached_len
        newly = sum(len(node.tokens) for node in found.node.path_up() if node not in locked)
        newly -= below if found.node not in locked else 0
        if (found.cached_len + self.size_info.evictable_size - newly) // self.page_size < required:
            return None
        handle = self.match_prefix(ids, namespace=namespace, priority=priority).handle
        self.lock_handle(handle)
        row[: handle.cached_len // self.page_size] = self.pages(handle.get_matched_indices())
        return handle

    def commit(
        self, ids: Int32Array, row: Int32Array, handle: OracleHandle, *, namespace: bytes = b"", finished: bool = False
    ) -> Int32Array:
        first, end = handle.cached_len // self.page_size, len(ids) // self.page_size
        old = OracleHandle(self, handle.node, handle.cached_len, handle.priority)
        freed = [EMPTY]
        if handle.attached and end > first:
            slots = (row[:end, None] * self.page_size + np.arange(self.page_size, dtype=np.int32)).reshape(-1)
            inserted = self.insert_prefix(self.whole_pages(ids), slots, namespace=namespace, priority=handle.priority)
            now = inserted.cached_len // self.page_size
            freed.append(row[first:now].copy())
            row[first:now] = self.pages(inserted.handle.get_matched_indices())[first:now]
            handle.node, handle.end = inserted.handle.node, inserted.handle.cached_len
        if not finished:
            self.lock_handle(handle)
        freed.append(self.pages(self.lock_handle(old, unlock=True)))
        return np.concatenate(freed)

    def finish(self, ids: Int32Array, row: Int32Array, handle: OracleHandle, *, namespace: bytes = b"") -> Int32Array:
        return self.commit(ids, row, handle, namespace=namespace, finished=True)

    def unlock_pages(self, handle: Handle) -> Int32Array:
        return self.pages(self.lock_handle(handle, unlock=True))

    def evict_pages(self, n: int) -> Int32Array:
        return self.pages(self.evict(n * self.page_size))

    def stats(self) -> CacheStats:
        raise NotImplementedError("the oracle keeps no statistics")

    def top_prefixes(self, n: int) -> list[HotPrefix]:
        raise NotImplementedError("the oracle keeps no statistics")

    @property
    def evictable_pages(self) -> int:
        return self.size_info.evictable_size // self.page_size

    def pages(self, slots: Int32Array) -> Int32Array:
        return slots[:: self.page_size] // self.page_size
