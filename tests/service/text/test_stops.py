from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.text import StopMatcher, StopStrings

LETTERS = st.text("ab<", max_size=12)
STOPS = st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4)


def cut_at_first_stop(text: str, stops: list[str], *, include_stop: bool) -> tuple[str, str | None]:
    """The rule in one sentence: the stop string completed first wins, among those the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def passed(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    sent, matched = "", None
    for piece in pieces:
        text, matched = matcher.push(piece)
        sent += text
    return sent + matcher.flush(), matched


@settings(max_examples=500)
@given(pieces=st.lists(LETTERS), stops=STOPS, include_stop=st.booleans())
def test_however_text_is_cut_into_pieces_it_is_passed_up_to_the_first_stop(
    pieces: list[str], stops: list[str], include_stop: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include_stop)
    assert passed(matcher, pieces) == cut_at_first_stop("".join(pieces), stops, include_stop=include_stop)


@settings(max_examples=500)
@given(pieces=st.lists(LETTERS), stops=STOPS)
def test_exactly_the_longest_suffix_that_may_begin_a_stop_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = sent = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        seen, sent = seen + piece, sent + text
        if matched is not None:
            assert matcher.held == ""
            return
        held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert (len(matcher.held), sent + matcher.held) == (held, seen)


def test_text_held_for_one_stop_is_sent_once_with_what_follows() -> None:
    matcher = StopMatcher(["\n", "Alice:"])
    assert matcher.push(" Alice") == (" ", None)
    assert matcher.push("!") == ("Alice!", None)
    assert matcher.flush() == ""


def test_a_stop_inside_a_piece_cuts_the_piece() -> None:
    assert StopMatcher(["\n"]).push("?\n") == ("?", "\n")
    assert StopMatcher(["\n"], include_stop=True).push("?\nmore") == ("?\n", "\n")


def test_text_held_at_the_end_comes_out() -> None:
    matcher = StopMatcher(["TRE\nAAAA"])
    assert passed(matcher, ["UNO", " DUE", " TRE"]) == ("UNO DUE TRE", None)


def test_a_stop_spread_over_pieces_leaks_nothing() -> None:
    matcher = StopMatcher(["<|im_end|>"])
    assert [matcher.push(piece) for piece in ("ok<", "|im_end", "|>")] == [("ok", None), ("", None), ("", "<|im_end|>")]
    assert matcher.flush() == ""


def test_a_stop_that_begins_inside_a_failed_one_is_found() -> None:
    assert passed(StopMatcher(["aab"]), ["a", "a", "a", "b", "x"]) == ("a", "aab")
    assert passed(StopMatcher(["abcd", "bce"]), ["abc", "e"]) == ("a", "bce")


def test_the_stop_completed_first_wins_and_then_the_longest() -> None:
    assert StopMatcher(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
    assert StopMatcher(["bc", "abc"]).push("xabc") == ("x", "abc")


def test_nothing_passes_after_a_stop() -> None:
    matcher = StopMatcher(["."], include_stop=True)
    assert [matcher.push(piece) for piece in ("a.", "b", ".")] == [("a.", "."), ("", "."), ("", ".")]
    assert matcher.flush() == ""


def test_without_stops_nothing_is_held() -> None:
    matcher = StopMatcher([])
    assert (matcher.push("abc"), matcher.flush()) == (("abc", None), "")


def test_continuations_share_compiled_stops_without_sharing_state() -> None:
    strings = StopStrings(["ab"])
    first, second = StopMatcher(strings), StopMatcher(strings)
    assert first.push("a") == ("", None)
    assert second.push("b") == ("b", None)
    assert first.push("b") == ("", "ab")
    assert second.push("a") == ("", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_a_stop_takes_one_step_for_each_character_however_long_it_grows() -> None:
    class Counting(StopStrings):
        steps = 0

        def step(self, state: int, character: str) -> int:
            self.steps += 1
            return super().step(state, character)

    strings = Counting(["a" * 1024])
    built = strings.steps
    matcher = StopMatcher(strings)
    for _ in range(500):
        matcher.push("aa")
    matcher.push("b")
    assert strings.steps - built == 1001
    assert matcher.held == ""
