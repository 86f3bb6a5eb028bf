"""A prefix cache in a radix tree: common prefixes are stored once, at the granularity of a page.

The tree has one true root; under it, one zero-length node for each namespace, made by the first insert that needs it
and dropped once it has neither children nor locks; under those, nodes of one or more whole pages. Everything is plain
Python on purpose: this is the tree that a faster one is judged by, so it prefers the obvious to the quick, and
``check_integrity`` proves what the rest relies on.

Promises, beyond those of ``PrefixCache``:

- **Identity is the tokens.** A hash only says where to look (``kvcache.node.page_hash``).
- **Sizes.** A node is protected while its reference count, the number of locks on it or on anything that extends it,
  is not zero. A lock therefore moves whole nodes between evictable and protected, and nothing else does but the
  first and last of them; a split changes no size, and the total changes only when slots come in or go out.
- **Order of eviction.** Time is a counter: every match and every insert ticks once and stamps the nodes on its path.
  A match that ends inside a node splits it first and stamps only the part that matched. Evicting takes, again and
  again, the unlocked leaf with the oldest stamp; a parent whose last child went is a leaf with a stamp of its own. The
  last leaf taken loses only its tail, and what stays keeps its stamp. Two leaves never have the same stamp, because
  the nodes of one stamp lie on one path: the order is total. It is also the order page by page, since the pages of a
  node always share a stamp: "forget the oldest page that nothing extends, n times".
- **Orphans.** What ``reset`` or ``discard`` cuts while it is locked can no longer be matched or evicted. It still
  counts as protected, keeps every node above it locked, and its slots are what the unlock returns that frees it.

Shapes: ids and slots are int32[n]. Not thread-safe.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from kvcache._core import fast_compare_key
from kvcache.arguments import as_int32, insertable_arrays, pages_up
from kvcache.base import (
    Handle,
    InsertResult,
    IntegrityError,
    MatchResult,
    NotEnoughEvictableError,
    PrefixCache,
    SizeInfo,
)
from kvcache.integrity import TreeState, check_tree
from kvcache.node import EMPTY, Node, PageKey, RadixHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache.base import Int32Array


class RadixCache(PrefixCache):
    """A radix tree of whole pages, evicting the least recently used first.

    Args:
        page_size: Tokens in a page, at least 1.
    """

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._tick = 0
        self._evictable = 0
        self._protected = 0
        self._node_count = 0
        self._orphans: set[Node] = set()
        self._root = _new_root()

    def match_prefix(self, ids: Int32Array | Sequence[int], *, namespace: bytes = b"") -> MatchResult:
        """Finds the longest cached prefix of ``ids`` (int32[n]), aligned down to a page, and marks it as just used.

        A namespace that holds nothing, or nothing of ``ids``, gives the empty prefix.

        Raises:
            TypeError, ValueError: ``ids`` are not one-dimensional integers that fit int32.
        """
        whole = self._whole_pages(as_int32(ids, "ids"))
        self._tick += 1
        top = self._root.children.get(PageKey(namespace))
        if top is None:
            return MatchResult(0, RadixHandle(self._root, 0))
        node, cached_len = self._descend(top, whole)
        return MatchResult(cached_len, self._handle(node, cached_len))

    def insert_prefix(
        self, ids: Int32Array | Sequence[int], slots: Int32Array | Sequence[int], *, namespace: bytes = b""
    ) -> InsertResult:
        """Takes over the slots of ``ids`` beyond what it already holds, aligned down to a page; copies what it keeps.

        Raises:
            TypeError, ValueError: See ``kvcache.arguments.insertable_arrays``; nothing was changed.
        """
        new_ids, new_slots = insertable_arrays(ids, slots, self.page_size)
        self._tick += 1
        if len(new_ids) == 0:
            return InsertResult(0, RadixHandle(self._root, 0))
        top = self._root.children.get(PageKey(namespace))
        if top is None:
            top = Node(self._root, PageKey(namespace), EMPTY, EMPTY, self._tick)
            self._root.children[top.edge] = top
        node, cached_len = self._descend(top, new_ids)
        if cached_len < len(new_ids):
            tokens = new_ids[cached_len:].copy()
            leaf = Node(node, self._first_page(tokens), tokens, new_slots[cached_len:].copy(), self._tick)
            node.children[leaf.edge] = leaf
            self._evictable += leaf.length
            self._node_count += 1
            node = leaf
        return InsertResult(cached_len, self._handle(node, len(new_ids)))

    def lock_handle(self, handle: Handle, unlock: bool = False) -> Int32Array:
        """Locks the path from ``handle`` to the root against eviction, or takes one lock back. Locks count.

        A locked prefix can be locked again after it was cut from the tree; an unlocked one cannot.

        Returns:
            int32[m]: the slots of orphans whose last lock this was; else empty.

        Raises:
            IntegrityError: Unlocking a handle that is not locked, or locking one that the cache no longer holds.
        """
        node = _node_of(handle)
        if unlock:
            return self._unlock(node)
        if not node.held:
            raise IntegrityError("a prefix that the cache no longer holds was locked")
        node.locks += 1
        for part in node.path_up():
            if part.ref_count == 0:
                self._evictable -= part.length
                self._protected += part.length
            part.ref_count += 1
        return EMPTY.copy()

    def evict(self, n: int) -> Int32Array:
        """Forgets ``n`` evictable tokens, rounded up to whole pages, in the order that this module's head gives.

        Returns:
            int32[m], m = n rounded up: leaf by leaf in the order they went, the slots of each in token order.

        Raises:
            NotEnoughEvictableError: Fewer are evictable; nothing was changed.
            ValueError: n is negative.
        """
        wanted = pages_up(n, self.page_size, "n")
        if wanted > self._evictable:
            raise NotEnoughEvictableError(f"{wanted} tokens to evict, but only {self._evictable} are evictable")
        freed = [EMPTY]
        leaves = [(node.last_access, node) for node in self._root.subtree() if node.is_evictable_leaf]
        heapq.heapify(leaves)
        while wanted > 0:
            _, leaf = heapq.heappop(leaves)
            if leaf.length > wanted:
                self._split(leaf, leaf.length - wanted)
            wanted -= leaf.length
            parent = leaf.parent
            freed += self._cut(leaf)
            if parent is not None and parent.is_evictable_leaf:
                heapq.heappush(leaves, (parent.last_access, parent))
        return np.concatenate(freed)

    @property
    def size_info(self) -> SizeInfo:
        """Tokens held, now; orphans are protected ones."""
        return SizeInfo(self._evictable, self._protected)

    @property
    def node_count(self) -> int:
        """Nodes that hold tokens and can be matched, now."""
        return self._node_count

    def reset(self) -> Int32Array:
        """Forgets everything, and detaches every handle given out so far, those to the empty prefix too.

        Returns:
            The slots that came free at once, int32: those under no lock.
        """
        freed = [EMPTY]
        for top in list(self._root.children.values()):
            freed += self._cut(top)
        self._root.attached = False
        self._root = _new_root()
        return np.concatenate(freed)

    def discard(self, handle: Handle, keep: int) -> Int32Array:
        """Forgets the prefix that ends at ``handle`` beyond its first ``keep`` tokens, with all that extends it.

        ``keep`` is aligned up to a page, and a node that it falls into is split there. Prefixes that leave the path at
        or before that point stay, as does all of it when nothing lies beyond.

        Returns:
            The slots that came free at once, int32: those under no lock.

        Raises:
            ValueError: keep is negative.
        """
        keep = pages_up(keep, self.page_size, "keep")
        node = _node_of(handle)
        start = handle.cached_len - node.length
        if not node.attached or keep >= handle.cached_len:
            return EMPTY.copy()
        while start > keep and node.parent is not None:
            node = node.parent
            start -= node.length
        if start < keep:
            self._split(node, keep - start)
        return np.concatenate([EMPTY, *self._cut(node)])

    def check_integrity(self) -> None:
        """Proves the invariants of ``kvcache.integrity``, walking the whole tree and its orphans.

        Raises:
            IntegrityError: One does not hold; the message says which.
        """
        check_tree(
            TreeState(
                root=self._root,
                orphans=self._orphans,
                page_size=self.page_size,
                tick=self._tick,
                sizes=self.size_info,
                node_count=self._node_count,
            )
        )

    def held_slots(self) -> Int32Array:
        """Every slot the cache owns, int32, orphans' too, in no particular order."""
        nodes = [*self._root.subtree(), *self._orphans]
        return np.concatenate([node.slots for node in nodes])

    def _whole_pages(self, ids: Int32Array) -> Int32Array:
        return ids[: len(ids) // self.page_size * self.page_size]

    def _first_page(self, tokens: Int32Array) -> PageKey:
        return PageKey(tokens[: self.page_size].tobytes())

    def _handle(self, node: Node, cached_len: int) -> RadixHandle:
        """The empty prefix ends at the root, so that no handle ever points to a namespace, which may be dropped."""
        return RadixHandle(node if cached_len else self._root, cached_len)

    def _descend(self, top: Node, ids: Int32Array) -> tuple[Node, int]:
        """Follows ``ids`` (whole pages) from a namespace's node, stamping the path and splitting where it ends.

        Returns:
            The node where the longest cached prefix ends, and the prefix's length.
        """
        node, depth = top, 0
        node.last_access = self._tick
        while depth < len(ids):
            rest = ids[depth:]
            child = node.children.get(self._first_page(rest))
            if child is None:
                break
            common = fast_compare_key(child.tokens, rest) // self.page_size * self.page_size
            node = self._split(child, common) if common < child.length else child
            node.last_access = self._tick
            depth += common
        return node, depth

    def _split(self, node: Node, at: int) -> Node:
        self._node_count += 1
        return node.split(at, self.page_size)

    def _cut(self, top: Node) -> list[Int32Array]:
        """Takes ``top`` and all that extends it out of the tree; returns the slots of what no lock holds."""
        parent = top.parent
        if parent is None:
            raise IntegrityError("a root cannot be cut from its tree")
        del parent.children[top.edge]
        freed = []
        for node in top.subtree():
            node.children = {}
            node.attached = False
            self._node_count -= node.length > 0
            if node.ref_count:
                self._orphans.add(node)
            else:
                self._evictable -= node.length
                freed.append(node.slots)
        self._drop_if_unused(parent)
        return freed

    def _unlock(self, node: Node) -> Int32Array:
        if node.locks == 0:
            raise IntegrityError("a handle that is not locked was unlocked")
        node.locks -= 1
        freed = [EMPTY]
        for part in node.path_up():
            part.ref_count -= 1
            if part.ref_count > 0:
                continue
            self._protected -= part.length
            if part.attached:
                self._evictable += part.length
                self._drop_if_unused(part)
            else:
                self._orphans.remove(part)
                freed.append(part.slots)
        return np.concatenate(freed)

    def _drop_if_unused(self, node: Node) -> None:
        """Drops the node of a namespace that holds nothing any more."""
        if node.parent is self._root and not node.children and node.ref_count == 0:
            del self._root.children[node.edge]
            node.attached = False


def _new_root() -> Node:
    root = Node(None, PageKey(b""), EMPTY, EMPTY, 0)
    root.ref_count = 1
    return root


def _node_of(handle: Handle) -> Node:
    if not isinstance(handle, RadixHandle):
        raise TypeError(f"not a handle of a radix cache: {type(handle).__name__}")
    return handle.node
