from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.text import Detokenizer, PieceTokenizer, Tokenizer, UnknownTokenError


def streamed(tokenizer: Tokenizer, ids: list[int], *, keep_special: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, keep_special=keep_special)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, 49151)), keep_special=st.booleans())
def test_pieces_of_random_ids_concatenate_to_the_full_decode(
    smollm: Tokenizer, ids: list[int], keep_special: bool
) -> None:
    assert "".join(streamed(smollm, ids, keep_special=keep_special)) == smollm.decode(ids, keep_special=keep_special)


@settings(max_examples=300)
@given(data=st.lists(st.sampled_from([0x41, 0x80, 0xA9, 0xBF, 0xC3, 0xE0, 0xE4, 0xED, 0xF0, 0xF4, 0xFF, 256])))
def test_broken_bytes_one_at_a_time_concatenate_to_the_full_decode(data: list[int]) -> None:
    tokenizer = PieceTokenizer.bytewise()
    assert "".join(streamed(tokenizer, data)) == tokenizer.decode(data)


@given(text=st.text(), data=st.data())
def test_valid_text_cut_anywhere_never_shows_half_a_character(text: str, data: st.DataObject) -> None:
    encoded = text.encode()
    cuts = sorted({0, len(encoded), *data.draw(st.lists(st.integers(0, len(encoded))))})
    pieces = [encoded[a:b] for a, b in itertools.pairwise(cuts)] or [b""]
    parts = streamed(PieceTokenizer(pieces), list(range(len(pieces))))
    assert "".join(parts) == text
    assert "".join(parts).count("\ufffd") == text.count("\ufffd")
    assert parts[-1] == ""


def test_a_window_s_decode_that_changes_its_last_character_repeats_nothing() -> None:
    # The full decodes of 1, 2 and 3 tokens are "A 世\ufffd", "A 世é\ufffd" and "A 世éü".
    tokenizer = PieceTokenizer([b"A \xe4\xb8\x96\xc3", b"\xa9\xc3", b"\xbc"])
    assert [tokenizer.decode(range(n)) for n in (1, 2, 3)] == ["A 世\ufffd", "A 世é\ufffd", "A 世éü"]
    assert streamed(tokenizer, [0, 1, 2]) == ["A 世", "é", "ü", ""]


def test_a_character_of_three_tokens_appears_once() -> None:
    assert streamed(PieceTokenizer([b"\xe4", b"\xb8", b"\xad"]), [0, 1, 2]) == ["", "", "中", ""]


def test_a_character_as_long_as_the_replacement_character_is_not_dropped() -> None:
    assert streamed(PieceTokenizer([b"\xe4\xb8", b"\xad", "\ufffd".encode()]), [0, 1, 2]) == ["", "中", "\ufffd", ""]


def test_a_literal_replacement_character_is_text() -> None:
    assert streamed(PieceTokenizer(["\ufffd".encode(), b"a"]), [0, 1, 0]) == ["\ufffd", "a", "\ufffd", ""]


def test_an_incomplete_character_appears_as_replacement_at_the_end_only() -> None:
    assert streamed(PieceTokenizer([b"a\xf0\x9f\x98"]), [0]) == ["a", "\ufffd"]


def test_an_invalid_byte_appears_as_soon_as_it_is_known_to_be_one() -> None:
    assert streamed(PieceTokenizer([b"\xe4", b"a", b"\xff"]), [0, 1, 2]) == ["", "\ufffda", "\ufffd", ""]


def test_leading_spaces_are_kept() -> None:
    assert streamed(PieceTokenizer([b"Paris", b" is"]), [0, 1]) == ["Paris", " is", ""]
    assert streamed(PieceTokenizer([b" ", b" leading", b" x"]), [0, 1, 2]) == [" ", " leading", " x", ""]


def test_special_tokens_are_skipped_unless_kept(smollm: Tokenizer) -> None:
    ids = [1, *smollm.encode("hi"), 2]
    assert streamed(smollm, ids) == ["", "hi", "", ""]
    assert streamed(smollm, ids, keep_special=True) == ["<|im_start|>", "hi", "<|im_end|>", ""]


def test_a_skipped_special_token_does_not_break_a_character() -> None:
    assert streamed(PieceTokenizer([b"\xc3", b"\xa9", b"<e>"], special={2}), [0, 2, 1]) == ["", "", "é", ""]


def test_a_flushed_detokenizer_is_as_new() -> None:
    detokenizer = Detokenizer(PieceTokenizer([b"\xc3", b"\xa9"]))
    assert (detokenizer.push(0), detokenizer.flush(), detokenizer.flush()) == ("", "\ufffd", "")
    assert (detokenizer.push(0), detokenizer.push(1)) == ("", "é")


def test_an_id_outside_the_vocabulary_is_an_error_and_changes_nothing() -> None:
    detokenizer = Detokenizer(PieceTokenizer([b"\xc3", b"\xa9"]))
    detokenizer.push(0)
    with pytest.raises(UnknownTokenError):
        detokenizer.push(2)
    assert detokenizer.push(1) == "é"
