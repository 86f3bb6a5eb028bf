from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from service.text import Tokenizer, TokenizerLoadError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LETTERS = [chr(c) for c in range(0x21, 0x7F)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": None}, "does not name its pre-tokenizer"),
        ({"pre": "default"}, "'default'.*not supported"),
        ({"pre": "no-such-family"}, "'no-such-family'.*not supported"),
        ({"model": "llama"}, "'llama' tokenizer.*only byte-level BPE"),
        ({"model": None}, "names no tokenizer"),
        ({"tokens": None}, "no tokens"),
        ({"merges": None}, "no merges"),
        ({"merges": ["hi"]}, "the merge 'hi'"),
        ({"merges": ["x nosuchtoken"]}, "BPE vocabulary is broken"),
        ({"token_type": [1, 1]}, "262 tokens but 2 token types"),
        ({"eos_token_id": 262}, "token id 262 is outside"),
        ({"bos_token_id": None}, "asks for a begin-of-sequence token but names none"),
        ({"eos_token_id": "258"}, "eos_token_id is not an integer"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "appears twice"),
    ],
)
def test_a_vocabulary_that_cannot_be_served_exactly_is_refused_in_one_line(
    write_gguf: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TokenizerLoadError, match=message) as caught:
        Tokenizer.from_gguf(write_gguf(**changes))
    assert "\n" not in str(caught.value)
    assert "model.gguf" in str(caught.value)


def test_end_of_sequence_ids_come_from_every_key_and_from_well_known_turn_ends(write_gguf: Callable[..., Path]) -> None:
    assert Tokenizer.from_gguf(write_gguf()).eos_token_ids == {258, 259}
    assert Tokenizer.from_gguf(write_gguf(eos_token_id=260, eot_token_id=10, eom_token_id=11)).eos_token_ids == {
        *(10, 11, 258, 259, 260)
    }


def test_a_turn_end_that_is_no_control_token_ends_nothing(write_gguf: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_gguf(write_gguf(token_type=[1] * 257 + [3, 3, 4, 4, 5]))
    assert tokenizer.eos_token_ids == {258}


def test_plain_text_begins_with_one_bos_where_the_file_asks_for_it(write_gguf: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_gguf(write_gguf())
    assert tokenizer.encode("hi") == [257, 256]
    assert tokenizer.encode("") == [257]
    assert tokenizer.encode("hi", add_special=False) == [256]


def test_text_that_already_begins_with_bos_gets_no_second_one(write_gguf: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_gguf(write_gguf())
    assert tokenizer.encode("<s>hi</s>", parse_special=True) == [257, 256, 258]


def test_bos_spelled_in_plain_text_is_text_behind_the_real_one(write_gguf: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_gguf(write_gguf())
    assert tokenizer.encode("<s>hi") == [257, *b"<s>", 256]


@pytest.mark.parametrize(("pre", "ids"), [("gpt-2", [256]), ("llama-bpe", [257, 256])])
def test_a_file_that_does_not_say_follows_its_family_about_bos(
    write_gguf: Callable[..., Path], pre: str, ids: list[int]
) -> None:
    assert Tokenizer.from_gguf(write_gguf(pre=pre, add_bos_token=None)).encode("hi") == ids


def test_a_file_that_says_no_overrules_its_family_about_bos(write_gguf: Callable[..., Path]) -> None:
    assert Tokenizer.from_gguf(write_gguf(pre="llama-bpe", add_bos_token=False)).encode("hi") == [256]


def test_user_defined_tokens_are_always_read_and_are_text(write_gguf: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_gguf(write_gguf(add_bos_token=False))
    assert tokenizer.encode("hi<think>hi") == [256, 260, 256]
    assert tokenizer.decode([256, 260]) == "hi<think>"
    assert not tokenizer.is_special(260)


def test_unused_tokens_are_never_read_and_never_shown(write_gguf: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_gguf(write_gguf(add_bos_token=False))
    assert tokenizer.encode("[unused]", parse_special=True) == list(b"[unused]")
    assert tokenizer.decode([256, 261]) == "hi"


def test_a_control_token_that_is_a_word_of_its_own_is_still_only_text_in_plain_text(
    write_gguf: Callable[..., Path],
) -> None:
    # llama-bpe takes a whole word that is a token without merging: the control token must not be found that way.
    tokens = [*LETTERS, "hi", "STOP"]
    path = write_gguf(pre="llama-bpe", tokens=tokens, token_type=[1] * 95 + [3], bos_token_id=0, eos_token_id=95)
    tokenizer = Tokenizer.from_gguf(path)
    assert tokenizer.encode("STOP", add_special=False) == [LETTERS.index(c) for c in "STOP"]
    assert tokenizer.encode("STOP", add_special=False, parse_special=True) == [95]


def test_a_whole_word_that_is_a_token_needs_no_merges_only_where_the_family_says_so(
    write_gguf: Callable[..., Path],
) -> None:
    changes: dict[str, Any] = {"tokens": [*LETTERS, "hi", "word"], "token_type": [1] * 96, "add_bos_token": False}
    changes |= {"bos_token_id": 0, "eos_token_id": 0}
    assert Tokenizer.from_gguf(write_gguf(pre="llama-bpe", **changes)).encode("word") == [95]
    assert len(Tokenizer.from_gguf(write_gguf(pre="gpt-2", **changes)).encode("word")) == 4


def test_a_token_outside_the_byte_alphabet_is_its_own_text(write_gguf: Callable[..., Path]) -> None:
    tokens = ["h", "i", "hi", "日本", "Ġb"]
    path = write_gguf(tokens=tokens, token_type=[1] * 5, bos_token_id=0, eos_token_id=0)
    tokenizer = Tokenizer.from_gguf(path)
    assert [tokenizer.token_bytes(i) for i in range(5)] == [b"h", b"i", b"hi", "日本".encode(), b" b"]
