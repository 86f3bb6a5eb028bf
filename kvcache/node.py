"""The parts of the radix tree: its nodes, the keys that find them, and handles to them.

A node holds a run of whole pages: the tokens of one edge, and their slots. Its children are found by their first page
of tokens. Two rules make handles survive every change of shape:

- a split leaves the *suffix* in the node that was there and puts the prefix into a new parent, so the end of a prefix
  stays in the same object for life;
- a node cut from the tree keeps its parent link, so that unlocking it still reaches every node its lock had reached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcache.base import Handle, IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache.base import Int32Array

EMPTY: Int32Array = np.empty(0, np.int32)
EMPTY.flags.writeable = False


def page_hash(data: bytes) -> int:
    """Where a page of tokens, or a namespace, is looked for. It never decides what is found: ``PageKey`` compares."""
    return hash(data)


class PageKey:
    """What a child is found by: the bytes of its first page of tokens or, under the root, of its namespace."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __hash__(self) -> int:
        return page_hash(self.data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PageKey) and self.data == other.data

    def __repr__(self) -> str:
        return f"PageKey({self.data!r})"


class Node:
    """A run of tokens in the tree, or the zero-length node of a namespace, or the root above those.

    Attributes:
        parent: The node that this one extends; None for a root.
        edge: The key under which the parent finds this node.
        tokens: int32[n], whole pages.
        slots: int32[n], where the keys and values of those tokens lie.
        children: The nodes that extend this one; none for a node that is no longer attached.
        locks: Locks taken on handles that end at this very node.
        ref_count: Locks on this node or anything that extends it; a root has one more, for ever.
        last_access: The tick of the last match or insert whose path held this node.
        attached: Whether a match can reach this node.
    """

    __slots__ = ("attached", "children", "edge", "last_access", "locks", "parent", "ref_count", "slots", "tokens")

    def __init__(
        self, parent: Node | None, edge: PageKey, tokens: Int32Array, slots: Int32Array, last_access: int
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.tokens = tokens
        self.slots = slots
        self.children: dict[PageKey, Node] = {}
        self.locks = 0
        self.ref_count = 0
        self.last_access = last_access
        self.attached = True

    @property
    def length(self) -> int:
        """Tokens in this node alone."""
        return len(self.tokens)

    @property
    def held(self) -> bool:
        """Whether the cache still owns what this node holds."""
        return self.attached or self.ref_count > 0

    @property
    def is_evictable_leaf(self) -> bool:
        """Whether ``evict`` may take this node as it is."""
        return self.length > 0 and not self.children and self.ref_count == 0

    def path_up(self) -> Iterator[Node]:
        """This node, then its parent, and so on to a root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        """This node and all that extends it, a parent before its children. A node may be emptied once yielded."""
        pending = [self]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield node

    def split(self, at: int, page_size: int) -> Node:
        """Moves the first ``at`` tokens (whole pages, not all) into a new parent, and returns it.

        The new parent inherits the reference count and the access time. The locks stay with this node, whose end is
        what they hold. Both halves are copies, so that no forgotten half keeps the other's memory.
        """
        prefix = Node(self.parent, self.edge, self.tokens[:at].copy(), self.slots[:at].copy(), self.last_access)
        prefix.ref_count = self.ref_count
        if self.parent is not None:
            self.parent.children[self.edge] = prefix
        self.parent = prefix
        self.tokens = self.tokens[at:].copy()
        self.slots = self.slots[at:].copy()
        self.edge = PageKey(self.tokens[:page_size].tobytes())
        prefix.children[self.edge] = self
        return prefix


class RadixHandle(Handle):
    """The end of ``node``, ``cached_len`` tokens from the root. The empty prefix ends at the root."""

    __slots__ = ("_cached_len", "node")

    def __init__(self, node: Node, cached_len: int) -> None:
        self.node = node
        self._cached_len = cached_len

    @property
    def cached_len(self) -> int:
        """Tokens of the prefix, a multiple of the page size."""
        return self._cached_len

    @property
    def attached(self) -> bool:
        """Whether the prefix can still be matched. A handle to the empty prefix is detached by ``reset`` alone."""
        return self.node.attached

    def get_matched_indices(self) -> Int32Array:
        """The prefix's slots, int32[cached_len], in token order; a copy.

        Raises:
            IntegrityError: The cache no longer owns them: they may be anyone's by now.
        """
        if not self.node.held:
            raise IntegrityError("the slots of a prefix that the cache no longer holds were asked for")
        parts = [node.slots for node in self.node.path_up()]
        return np.concatenate(parts[::-1])
