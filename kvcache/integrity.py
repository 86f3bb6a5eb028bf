"""Proof that a radix tree is what it claims to be: the one checker that every test of pages runs.

It walks the whole tree and all orphans and believes no counter. Its cost is proportional to what the cache holds, so
the serving path never calls it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvcache.arguments import check_page_slots
from kvcache.base import IntegrityError, SizeInfo
from kvcache.node import Node, PageKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Set


@dataclass(frozen=True, slots=True)
class TreeState:
    """All of a tree's state: the nodes, and the counters to be proved against them.

    Attributes:
        root: The true root.
        orphans: Nodes cut from the tree that locks still hold.
        page_size: Tokens in a page.
        tick: The time of the last match or insert.
        sizes: What the tree says it holds, in tokens.
        node_count: How many nodes it says hold tokens and can be matched.
    """

    root: Node
    orphans: Set[Node]
    page_size: int
    tick: int
    sizes: SizeInfo
    node_count: int


def check_tree(state: TreeState) -> None:
    """Proves shape, links, stamps, reference counts, page structure, slot ownership and counters.

    Raises:
        IntegrityError: One does not hold; the message says which.
    """
    nodes = list(state.root.subtree())
    _check_shape(state, nodes)
    _check_orphans(state, nodes)
    _check_stamps(state, nodes)
    _check_references(state, nodes)
    _check_contents([*nodes, *state.orphans], state.page_size)
    _check_counters(state, nodes)


def _require(holds: bool, fault: str, node: Node | None = None) -> None:
    if not holds:
        where = "" if node is None else f", at {node.edge!r} with {node.length} tokens"
        raise IntegrityError(fault + where)


def _check_shape(state: TreeState, nodes: Iterable[Node]) -> None:
    _require(state.root.parent is None, "the root has a parent")
    _require(state.root.length == 0, "the root holds tokens")
    for node in nodes:
        _require(node.attached, "a node in the tree says that it is detached", node)
        for edge, child in node.children.items():
            _require(child.parent is node, "a child's parent link points elsewhere", child)
            _require(
                child.edge == edge and node.children.get(edge) is child, "a child is filed under another key", child
            )
            if node is state.root:
                _require(child.length == 0, "a node under the root is no namespace", child)
                _require(bool(child.children) or child.ref_count > 0, "a namespace is empty and unlocked", child)
            else:
                _require(child.length > 0, "an empty node is no namespace", child)
                first_page = PageKey(child.tokens[: state.page_size].tobytes())
                _require(child.edge == first_page, "a child's key is not its first page", child)


def _check_orphans(state: TreeState, nodes: list[Node]) -> None:
    in_tree = set(nodes)
    for orphan in state.orphans:
        _require(orphan not in in_tree, "an orphan is in the tree", orphan)
        _require(not orphan.attached, "an orphan says that it is attached", orphan)
        _require(not orphan.children, "an orphan has children", orphan)
        _require(orphan.ref_count > 0, "an orphan is held by no lock", orphan)
        parent = orphan.parent
        if parent is None:
            raise IntegrityError("an orphan has no parent")
        former_root = parent.parent is None and not parent.attached
        _require(parent in in_tree or parent in state.orphans or former_root, "an orphan's parent was freed", orphan)


def _check_stamps(state: TreeState, nodes: list[Node]) -> None:
    for node in nodes:
        _require(node.last_access <= state.tick, "a node was used in the future", node)
        if node.parent is not None and node.parent is not state.root:
            _require(node.last_access <= node.parent.last_access, "a node was used after its parent", node)
    leaf_stamps = [node.last_access for node in nodes if not node.children and node.length]
    _require(len(leaf_stamps) == len(set(leaf_stamps)), "two leaves share a stamp: eviction has no order")


def _check_references(state: TreeState, nodes: list[Node]) -> None:
    inherited: Counter[Node] = Counter()
    for node in [*nodes, *state.orphans]:
        if node.parent is not None:
            inherited[node.parent] += node.ref_count
    for node in [*nodes, *state.orphans]:
        permanent = 1 if node is state.root else 0
        _require(node.locks >= 0, "a node has fewer than no locks", node)
        _require(
            node.ref_count == permanent + node.locks + inherited[node],
            "a reference count is not the number of locks on the node and what extends it",
            node,
        )


def _check_contents(nodes: Iterable[Node], page_size: int) -> None:
    slots = []
    for node in nodes:
        _require(node.tokens.dtype == np.int32 and node.slots.dtype == np.int32, "an array is not int32", node)
        _require(node.tokens.shape == (node.length,) == node.slots.shape, "tokens and slots differ in number", node)
        _require(node.length % page_size == 0, "a length is no multiple of the page size", node)
        try:
            check_page_slots(node.slots, page_size)
        except ValueError as error:
            raise IntegrityError(str(error)) from error
        slots.append(node.slots)
    held = np.concatenate(slots)
    _require(len(np.unique(held)) == len(held), "a slot is held twice")


def _check_counters(state: TreeState, nodes: Iterable[Node]) -> None:
    holding = [node for node in nodes if node.length]
    evictable = sum(node.length for node in holding if node.ref_count == 0)
    protected = sum(node.length for node in holding if node.ref_count > 0)
    protected += sum(orphan.length for orphan in state.orphans)
    _require(state.sizes == SizeInfo(evictable, protected), f"the sizes are not {evictable} + {protected}")
    _require(state.node_count == len(holding), f"the node count is not {len(holding)}")
