"""What ``radixd top`` draws: how the pages of the pool are used, how fast it goes, and the hottest prefixes as a tree.

Everything the server says is shown as text and never as markup, with what does not print spelled out: a prompt cannot
reach the terminal. Lines that are too long are cut; counts stand before texts, so that they are cut last.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Group
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from rich.tree import Tree

from service.visible import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from radixd.v1 import cache_pb2 as pb
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

HEADER_LINES = 6
"""Lines above the first prefix."""

_MAX_BAR = 100
_INDENT = 4
_LABEL_WIDTH = 40
"""Columns that the tree leaves to what it says of a prefix."""
# Each kind of page: the word for it, how its part of the bar looks, and how where only ASCII can be shown.
_KINDS = (
    ("protected", "\u2588", "#", "red"),
    ("evictable", "\u2593", "+", "green"),
    ("private", "\u2592", "-", "yellow"),
    ("free", "\u2591", ".", "bright_black"),
)


@dataclass(frozen=True, slots=True)
class Frame:
    """What was seen at one look.

    Attributes:
        model: The served model's name.
        stats: The server's counts.
        prefixes: The hottest, hottest first.
        at: When, in monotonic seconds.
    """

    model: str
    stats: pb.GetStatsResponse
    prefixes: Sequence[pb.CachedPrefix]
    at: float


def draw(frame: Frame, previous: Frame | None) -> RenderableType:
    """All of one frame; ``previous`` is the one before it, from which speeds are measured."""
    counts = pages_by_kind(frame.stats)
    return Group(
        _line(_title(frame)),
        Bar([(counts[word], wide, narrow, style) for word, wide, narrow, style in _KINDS]),
        _line(_legend(frame.stats, counts)),
        _line(Text(activity(frame, previous))),
        Text(),
        PrefixTree(frame.prefixes),
    )


def pages_by_kind(stats: pb.GetStatsResponse) -> dict[str, int]:
    """The pool's pages by what they are used for; pages that retire are still private to somebody."""
    return {
        "protected": stats.pages_protected,
        "evictable": stats.pages_evictable,
        "private": stats.pages_private + stats.pages_retiring,
        "free": stats.pages_free,
    }


def activity(frame: Frame, previous: Frame | None) -> str:
    """What goes on, in words; a speed only where there was a look before, at the same run of the server."""
    stats = frame.stats
    parts = [f"{stats.running} running, {stats.waiting} waiting"]
    if stats.lookup_tokens:
        parts.append(f"hit rate {stats.hit_tokens / stats.lookup_tokens:.1%}")
    if previous is not None and frame.at > previous.at:
        tokens = stats.forwarded_tokens - previous.stats.forwarded_tokens
        if tokens >= 0:
            parts.append(f"{tokens / (frame.at - previous.at):.1f} tok/s")
    classes = list(stats.evicted_pages_by_class)
    by_class = f" ({' + '.join(map(str, classes))})" if len(classes) > 1 and stats.evicted_pages else ""
    parts.append(f"{stats.evicted_pages} pages evicted{by_class}")
    return "   ".join(parts)


class PrefixTree:
    """The prefixes, each under the one that it extends, siblings in the order they came in.

    Where that would indent them so far that no text is seen, they stand under each other instead.

    Args:
        prefixes: As the server lists them.
    """

    def __init__(self, prefixes: Sequence[pb.CachedPrefix]) -> None:
        self._prefixes = prefixes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich."""
        if not self._prefixes:
            yield _line(Text("nothing is cached"))
            return
        tree = Tree(_line(Text("hits  pages  hottest prefixes", "dim")), guide_style="dim")
        deepest = max((options.max_width - _LABEL_WIDTH) // _INDENT, 1)
        # Of each prefix: where what extends it goes, and how deep that is.
        places: dict[int, tuple[Tree, int]] = {}
        for index in parents_first([prefix.parent for prefix in self._prefixes]):
            prefix = self._prefixes[index]
            above, depth = places.get(prefix.parent, (tree, 1))
            node = above.add(_line(_label(prefix, is_top=prefix.parent not in places)))
            places[index] = (node, depth + 1) if depth < deepest else (above, depth)
        yield tree


def parents_first(parents: Sequence[int]) -> list[int]:
    """All indices, each after its parent and else in order; a parent that does not exist, or is its own, is none."""
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(parents):
        children.setdefault(parent if 0 <= parent < len(parents) else -1, []).append(index)
    ordered: list[int] = []
    # A ring has no top; its links come from a server that is wrong, and the first of it is taken for its top.
    seen: set[int] = set()
    for top in (*children.get(-1, ()), *range(len(parents))):
        stack = [top]
        while stack:
            index = stack.pop()
            if index not in seen:
                seen.add(index)
                ordered.append(index)
                stack.extend(reversed(children.get(index, ())))
    return ordered


class Bar:
    """A line divided in proportion.

    Args:
        parts: Of each its amount, its character, the same in ASCII, and its colour.
    """

    def __init__(self, parts: Sequence[tuple[int, str, str, str]]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich."""
        width = min(options.max_width, _MAX_BAR)
        cells = shares([amount for amount, *_ in self._parts], width)
        for (_, character, ascii_character, style), share in zip(self._parts, cells, strict=True):
            yield Segment((ascii_character if options.ascii_only else character) * share, Style.parse(style))
        yield Segment.line()


def shares(amounts: Sequence[int], width: int) -> list[int]:
    """``width`` cells divided in proportion to the amounts; all 0 if these are."""
    total = sum(amounts)
    if total <= 0:
        return [0] * len(amounts)
    ends = [0]
    for amount in amounts:
        ends.append(ends[-1] + amount)
    return [
        (end * width + total // 2) // total - (begin * width + total // 2) // total for begin, end in pairwise(ends)
    ]


def _title(frame: Frame) -> Text:
    stats = frame.stats
    kept = f"{stats.namespaces} namespaces, {stats.nodes} nodes"
    policy = f", evicts by {visible(stats.eviction)}" if stats.eviction else ""
    return Text.assemble((visible(frame.model), "bold"), f"   {kept}{policy}")


def _legend(stats: pb.GetStatsResponse, counts: dict[str, int]) -> Text:
    text = Text(f"{stats.pages_total} pages of {stats.page_size} tokens:")
    for word, _, _, style in _KINDS:
        text.append(f"  {word} ").append(str(counts[word]), style)
    return text


def _label(prefix: pb.CachedPrefix, *, is_top: bool) -> Text:
    salt = f"[{visible(prefix.salt)}] " if is_top and prefix.salt else ""
    return Text.assemble((f"{prefix.hits:4}", "cyan"), f"  {prefix.pages:5}  ", (salt, "magenta"), visible(prefix.text))


def _line(text: Text) -> Text:
    """The same on one line, whatever the width."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
