"""The checker itself: each kind of damage must be noticed, or every other test proves less than it seems to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvcache import IntegrityError, RadixCache
from kvcache.node import EMPTY, Node, PageKey

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def cache() -> RadixCache:
    """A locked trunk [0..3] with two leaves, another namespace, and one orphan of a discard."""
    cache = RadixCache(2)
    trunk = cache.insert_prefix([0, 1, 2, 3], [0, 1, 2, 3]).handle
    cache.insert_prefix([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    cache.insert_prefix([0, 1, 2, 3, 6, 7], [0, 1, 2, 3, 6, 7])
    cache.insert_prefix([0, 1], [8, 9], namespace=b"other")
    orphan = cache.insert_prefix([0, 1, 2, 3, 8, 9], [0, 1, 2, 3, 10, 11]).handle
    cache.lock_handle(trunk)
    cache.lock_handle(orphan)
    cache.discard(orphan, 4)
    cache.check_integrity()
    return cache


def trunk(cache: RadixCache) -> Node:
    return cache._root.children[PageKey(b"")].children[key(0, 1)]


def leaf(cache: RadixCache) -> Node:
    return trunk(cache).children[key(4, 5)]


def sibling(cache: RadixCache) -> Node:
    return trunk(cache).children[key(6, 7)]


def orphan(cache: RadixCache) -> Node:
    return next(iter(cache._orphans))


def key(*tokens: int) -> PageKey:
    return PageKey(np.array(tokens, np.int32).tobytes())


def assign(target: Callable[[RadixCache], Node], **values: object) -> Callable[[RadixCache], None]:
    def damage(cache: RadixCache) -> None:
        for name, value in values.items():
            setattr(target(cache), name, value)

    return damage


def refile(cache: RadixCache) -> None:
    node = trunk(cache).children.pop(key(4, 5))
    node.edge = key(4, 4)
    trunk(cache).children[node.edge] = node


def misfile(cache: RadixCache) -> None:
    trunk(cache).children[key(4, 4)] = trunk(cache).children.pop(key(4, 5))


def adopt(cache: RadixCache) -> None:
    leaf(cache).parent = sibling(cache)


def empty_namespace(cache: RadixCache) -> None:
    cache._root.children[PageKey(b"new")] = Node(cache._root, PageKey(b"new"), EMPTY, EMPTY, 0)


def namespace_with_tokens(cache: RadixCache) -> None:
    node = Node(cache._root, key(1, 2), np.array([1, 2], np.int32), np.array([20, 21], np.int32), 0)
    cache._root.children[node.edge] = node


def lose_orphan(cache: RadixCache) -> None:
    cache._orphans.clear()


def free_orphans_parent(cache: RadixCache) -> None:
    orphan(cache).parent = Node(leaf(cache), key(1, 2), EMPTY, EMPTY, 0)


def keep_orphan_in_tree(cache: RadixCache) -> None:
    trunk(cache).children[key(8, 9)] = orphan(cache)


def parent_of_root(cache: RadixCache) -> None:
    cache._root.parent = leaf(cache)


def tokens_in_root(cache: RadixCache) -> None:
    cache._root.tokens = np.array([1, 2], np.int32)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (parent_of_root, "the root has a parent"),
        (tokens_in_root, "the root holds tokens"),
        (assign(leaf, attached=False), "says that it is detached"),
        (adopt, "parent link"),
        (misfile, "filed under another key"),
        (refile, "not its first page"),
        (empty_namespace, "a namespace is empty"),
        (namespace_with_tokens, "no namespace"),
        (assign(leaf, tokens=EMPTY, slots=EMPTY), "an empty node"),
        (keep_orphan_in_tree, "detached"),
        (assign(orphan, attached=True), "an orphan says that it is attached"),
        (assign(orphan, children={key(1, 2): None}), "an orphan has children"),
        (assign(orphan, ref_count=0), "held by no lock"),
        (assign(orphan, parent=None), "an orphan has no parent"),
        (free_orphans_parent, "an orphan's parent was freed"),
        (lose_orphan, "a reference count"),
        (assign(leaf, last_access=10**6), "used in the future"),
        (assign(trunk, last_access=0), "used after its parent"),
        (assign(trunk, ref_count=3), "a reference count"),
        (assign(trunk, ref_count=1), "a reference count"),
        (assign(trunk, locks=0), "a reference count"),
        (assign(leaf, locks=-1), "fewer than no locks"),
        (assign(leaf, slots=np.array([4, 5], np.int64)), "not int32"),
        (assign(leaf, slots=np.array([4], np.int32)), "differ in number"),
        (
            assign(leaf, tokens=np.array([4, 5, 6], np.int32), slots=np.array([4, 5, 6], np.int32)),
            "no multiple of the page size",
        ),
        (assign(leaf, slots=np.array([5, 4], np.int32)), "whole pages"),
        (assign(leaf, slots=np.array([2, 3], np.int32)), "held twice"),
        (assign(leaf, slots=np.array([10, 11], np.int32)), "held twice"),
    ],
)
def test_damage_to_the_tree_is_noticed(cache: RadixCache, damage: Callable[[RadixCache], None], fault: str):
    damage(cache)
    with pytest.raises(IntegrityError, match=fault):
        cache.check_integrity()


def test_two_leaves_of_the_same_age_are_noticed(cache: RadixCache):
    sibling(cache).last_access = leaf(cache).last_access
    with pytest.raises(IntegrityError, match="share a stamp"):
        cache.check_integrity()


@pytest.mark.parametrize("counter", ["_evictable", "_protected", "_node_count"])
@pytest.mark.parametrize("error", [-2, 2])
def test_a_counter_that_drifted_is_noticed(cache: RadixCache, counter: str, error: int):
    setattr(cache, counter, getattr(cache, counter) + error)
    with pytest.raises(IntegrityError, match=r"sizes|node count"):
        cache.check_integrity()
