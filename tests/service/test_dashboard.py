"""What ``radixd top`` draws of what it saw."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixd.v1 import cache_pb2 as pb
from rich.console import Console

from service.dashboard import HEADER_LINES, Frame, activity, draw, parents_first, shares

STATS = {"pages_total": 100, "pages_free": 50, "pages_evictable": 25, "pages_private": 25, "page_size": 16}


def frame(*prefixes: tuple[int, str], at: float = 0.0, **stats: object) -> Frame:
    listed = [pb.CachedPrefix(parent=parent, text=text, hits=2, pages=1) for parent, text in prefixes]
    return Frame("tiny", pb.GetStatsResponse(**(STATS | stats)), listed, at)


def drawn(seen: Frame, width: int = 60, previous: Frame | None = None, **kwargs: object) -> list[str]:
    console = Console(width=width, **({"color_system": None, "force_terminal": False} | kwargs))  # type: ignore[arg-type]
    with console.capture() as captured:
        console.print(draw(seen, previous))
    return captured.get().splitlines()


def test_prefixes_stand_under_what_they_extend_in_their_order() -> None:
    lines = drawn(frame((2, "leaf"), (-1, "other"), (-1, "root"), (2, "second")))
    assert [line.split()[-1] for line in lines[HEADER_LINES:]] == ["other", "root", "leaf", "second"]
    assert [line.index(line.split()[-1]) for line in lines[HEADER_LINES:]] == [17, 17, 21, 21]


def test_a_long_chain_stops_moving_right_before_its_texts_are_cut() -> None:
    lines = drawn(frame(*((index - 1, f"turn {index}") for index in range(30))), width=60)
    assert [line[line.index("turn") :] for line in lines[HEADER_LINES:]] == [f"turn {index}" for index in range(30)]
    assert lines[HEADER_LINES + 4].index("turn") == lines[-1].index("turn") > lines[HEADER_LINES].index("turn")


def test_an_empty_cache_says_so() -> None:
    assert drawn(frame())[-1].strip() == "nothing is cached"


def test_the_bar_divides_its_whole_width_by_what_pages_are_used_for() -> None:
    assert drawn(frame(), width=40)[1] == "\u2593" * 10 + "\u2592" * 10 + "\u2591" * 20


@given(st.lists(st.integers(0, 10**12), max_size=6), st.integers(0, 200))
def test_shares_fill_the_width_and_none_is_a_whole_cell_off(amounts: list[int], width: int) -> None:
    cells = shares(amounts, width)
    assert sum(cells) == (width if sum(amounts) else 0)
    assert all(
        abs(cell - amount * width / (sum(amounts) or 1)) <= 1 for cell, amount in zip(cells, amounts, strict=True)
    )


@given(st.lists(st.integers(-2, 12), max_size=10))
def test_every_prefix_is_drawn_once_and_after_its_parent_whatever_the_links(parents: list[int]) -> None:
    ordered = parents_first(parents)
    assert sorted(ordered) == list(range(len(parents)))
    forest = all(parent < index for index, parent in enumerate(parents))
    if forest:
        assert all(parent < 0 or ordered.index(parent) < ordered.index(i) for i, parent in enumerate(parents))


def test_speed_is_told_between_two_looks_at_the_same_run() -> None:
    before, after = frame(forwarded_tokens=100, at=1.0), frame(forwarded_tokens=400, at=3.0)
    assert "150.0 tok/s" in activity(after, before)
    assert "tok/s" not in activity(after, None)
    restarted = frame(forwarded_tokens=10, at=4.0)
    assert "tok/s" not in activity(restarted, after)


def test_the_hit_rate_and_the_classes_of_evicted_pages_are_told_once_there_are_any() -> None:
    assert activity(frame(), None) == "0 running, 0 waiting   0 pages evicted"
    told = activity(frame(lookup_tokens=8, hit_tokens=6, evicted_pages=5, evicted_pages_by_class=[3, 2]), None)
    assert "hit rate 75.0%" in told
    assert "5 pages evicted (3 + 2)" in told


@pytest.mark.parametrize("width", [1, 2, 3, 5, 9, 17, 33])
def test_the_narrowest_terminal_gets_one_line_for_each_thing(width: int) -> None:
    chain = frame(*((index - 1, "text") for index in range(40)), evicted_pages=7)
    lines = drawn(chain, width=width)
    assert len(lines) == HEADER_LINES + (40 if width > 4 else 0)
    assert max(map(len, lines)) <= width


def test_nothing_that_a_server_says_reaches_the_terminal_unspelled() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b1m[bold]\r\n\u202e"
    seen = frame((-1, evil))
    seen.prefixes[0].salt = evil
    hostile = Frame(evil, pb.GetStatsResponse(eviction=evil, **STATS), seen.prefixes, 0.0)
    lines = drawn(hostile, width=400)
    assert len(lines) == HEADER_LINES + 1
    assert all(line.isprintable() for line in lines)
    assert lines[-1].count("\\x1b]0;owned\\x07\\x1b[2J\\x9b1m[bold]\\r\\n\\u202e") == 2


def test_where_only_ascii_can_be_shown_nothing_else_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "encoding", "ascii")
    assert "".join(drawn(frame((-1, "root"), (0, "leaf")), width=100)).isascii()
