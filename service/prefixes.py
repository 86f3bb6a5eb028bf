"""The hottest prefixes of the cache, for people: which extends which, and what they say.

The cache gives tokens and pages; here they become text, each prefix showing only what it adds to the one that it
extends. All of this may take long, for prefixes may be as long as a context: it runs on the prompts' threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixd.v1 import cache_pb2 as pb

from service.namespace import Namespace
from service.visible import ELLIPSIS, cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache.base import HotPrefix, Int32Array
    from service.text import Tokenizer


def describe(prefixes: Sequence[HotPrefix], tokenizer: Tokenizer, text_bytes: int) -> list[pb.CachedPrefix]:
    """The prefixes in the same order, as the contract has them.

    Args:
        prefixes: Distinct ones.
        tokenizer: Of the model that computed them.
        text_bytes: Bytes of text at most for each.
    """
    described = []
    for prefix, parent in zip(prefixes, parents_of(prefixes), strict=True):
        shared = 0 if parent < 0 else len(prefixes[parent].ids)
        described.append(
            pb.CachedPrefix(
                salt=Namespace.decode(prefix.namespace).salt,
                tokens=len(prefix.ids),
                pages=len(prefix.pages),
                hits=prefix.hits,
                parent=parent,
                text=begin_of(prefix.ids[shared:], tokenizer, text_bytes),
            )
        )
    return described


def parents_of(prefixes: Sequence[HotPrefix]) -> list[int]:
    """For each the index of the longest other one in its namespace that it extends, or -1.

    Sorted by their ids' bytes, a prefix stands before all that extend it and nothing else stands between; so the ones
    that the next may extend are a stack.
    """
    keys = [(prefix.namespace, prefix.ids.tobytes()) for prefix in prefixes]
    parents = [-1] * len(keys)
    open_ones: list[int] = []
    for index in sorted(range(len(keys)), key=keys.__getitem__):
        namespace, ids = keys[index]
        while open_ones and not (keys[open_ones[-1]][0] == namespace and ids.startswith(keys[open_ones[-1]][1])):
            open_ones.pop()
        if open_ones:
            parents[index] = open_ones[-1]
        open_ones.append(index)
    return parents


def begin_of(ids: Int32Array, tokenizer: Tokenizer, text_bytes: int) -> str:
    """The text that the ids begin with, what does not print spelled out, with an ellipsis where it was cut.

    Args:
        ids: int32[n]; the first may be the middle of a character.
        tokenizer: Theirs.
        text_bytes: Bytes of UTF-8 at most, the ellipsis not counted.
    """
    data, read = bytearray(), 0
    # Some more than is shown, so that no character at the cut is incomplete.
    while read < len(ids) and len(data) <= text_bytes + 4:
        data += tokenizer.token_bytes(int(ids[read]))
        read += 1
    shown, whole = cut(data.decode(errors="replace"), text_bytes)
    return shown if whole and read == len(ids) else shown + ELLIPSIS
