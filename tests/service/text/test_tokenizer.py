from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.text import PieceTokenizer, Tokenizer, TokenizerLoadError, UnencodableTextError, UnknownTokenError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ABSENT = "\x04\x06\x13\x14\x16\x1d"
"""Control characters that SmolLM2's vocabulary has no byte for; it also lacks the lead bytes of planes 4 to 11."""


def encodable_text() -> st.SearchStrategy[str]:
    plausible = st.characters(exclude_categories=["Cs"], exclude_characters=ABSENT, max_codepoint=0x3FFFF)
    spelled = st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", " ", "\n", "1", "'s", "é"])
    return st.lists(st.one_of(st.text(plausible), spelled)).map("".join)


@settings(deadline=None)
@given(text=encodable_text())
def test_decode_undoes_encode_for_any_text_of_the_default_model(smollm: Tokenizer, text: str) -> None:
    assert smollm.decode(smollm.encode(text)) == text
    assert smollm.decode(smollm.encode(text, parse_special=True), keep_special=True) == text


@settings(deadline=None)
@given(text=st.text())
def test_decode_undoes_encode_for_any_text_of_a_bytewise_vocabulary(text: str) -> None:
    tokenizer = PieceTokenizer.bytewise()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_the_lower_bound_of_a_text_s_tokens_is_one(smollm: Tokenizer, text: str) -> None:
    for repeated in (text, text * 50):
        assert smollm.fewest_tokens(repeated) <= len(smollm.encode(repeated))
        assert smollm.fewest_tokens(repeated) <= len(smollm.encode(repeated, parse_special=True))


def test_the_lower_bound_refuses_megabytes_without_encoding_them(smollm: Tokenizer) -> None:
    assert smollm.fewest_tokens("The quick brown fox. " * 250_000) > 8192


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("각ᄀ\u1161\u11a8e\u0301\u1fc1\u0344\u2126ab"), max_size=60))
def test_the_lower_bound_holds_where_text_is_composed_first(write_gguf: Callable[..., Path], text: str) -> None:
    tokenizer = Tokenizer.from_gguf(write_gguf(pre="qwen2", add_bos_token=False))
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


@pytest.mark.parametrize("character", ABSENT)
def test_a_byte_without_a_token_is_left_out_as_the_references_do(smollm: Tokenizer, character: str) -> None:
    assert smollm.encode(f"a{character}b") == [*smollm.encode("a"), *smollm.encode("b")]


def test_control_tokens_in_plain_text_are_text(smollm: Tokenizer) -> None:
    ids = smollm.encode("<|im_start|>user\nhi<|im_end|>")
    assert not any(smollm.is_special(i) for i in ids)
    assert smollm.decode(ids) == "<|im_start|>user\nhi<|im_end|>"


def test_control_tokens_are_parsed_when_asked_for_and_left_out_of_the_text(smollm: Tokenizer) -> None:
    ids = smollm.encode("<|im_start|>user\nhi<|im_end|>", parse_special=True)
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm.decode(ids) == "user\nhi"
    assert smollm.decode(ids, keep_special=True) == "<|im_start|>user\nhi<|im_end|>"


def test_the_default_model_names_its_tokens(smollm: Tokenizer) -> None:
    assert (smollm.vocab_size, smollm.bos_token_id, smollm.eos_token_id) == (49152, 1, 2)
    assert smollm.eos_token_ids == {0, 2}
    assert not smollm.adds_bos
    assert smollm.token_bytes(2) == b"<|im_end|>"
    assert smollm.token_bytes(905) == b" world"
    assert [i for i in range(smollm.vocab_size) if smollm.is_special(i)] == list(range(17))


@pytest.mark.parametrize("token_id", [-1, 49152])
def test_an_id_outside_the_vocabulary_is_an_error_that_names_it(smollm: Tokenizer, token_id: int) -> None:
    with pytest.raises(UnknownTokenError, match=str(token_id)):
        smollm.token_bytes(token_id)
    with pytest.raises(UnknownTokenError):
        smollm.decode([3, token_id])


def test_a_lone_surrogate_is_an_error_that_names_its_place(smollm: Tokenizer) -> None:
    with pytest.raises(UnencodableTextError, match="character 2") as caught:
        smollm.encode("ab\ud800c")
    assert caught.value.position == 2


def test_threads_share_a_tokenizer(smollm: Tokenizer) -> None:
    texts = [f"thread {n}: Café {n * 7} <|im_end|>" * 20 for n in range(32)]
    expected = [smollm.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(smollm.encode, texts)) == expected


def test_pieces_are_matched_longest_first() -> None:
    tokenizer = PieceTokenizer([b"a", b"ab", b"abc", b"c"])
    assert tokenizer.encode("abcabac") == [2, 1, 0, 3]


def test_among_equal_pieces_the_lowest_id_is_used() -> None:
    assert PieceTokenizer([b"", b"a", b"a"]).encode("aa") == [1, 1]


def test_a_special_piece_is_text_unless_parsed() -> None:
    tokenizer = PieceTokenizer([b"<", b">", b"eos", b"<eos>", b"s><"], special={3}, eos_token_ids={3})
    assert tokenizer.encode("<eos><") == [0, 2, 1, 0]
    assert tokenizer.encode("<eos><", parse_special=True) == [3, 0]
    assert tokenizer.decode([0, 3, 1]) == "<>"
    assert (tokenizer.eos_token_id, tokenizer.eos_token_ids) == (3, {3})


def test_a_text_that_no_piece_begins_is_an_error_that_names_the_character() -> None:
    with pytest.raises(UnencodableTextError, match="character 3") as caught:
        PieceTokenizer(["é".encode(), b"a"]).encode("éaéz")
    assert caught.value.position == 3


def test_a_piece_vocabulary_adds_one_bos_if_told_to() -> None:
    tokenizer = PieceTokenizer([b"a", b"<s>"], special={1}, bos_token_id=1, add_bos=True)
    assert tokenizer.encode("a") == [1, 0]
    assert tokenizer.encode("<s>a", parse_special=True) == [1, 0]


def test_a_bytewise_vocabulary_ends_at_its_special_tokens() -> None:
    tokenizer = PieceTokenizer.bytewise(("<eos>", "<eot>"))
    assert tokenizer.vocab_size == 258
    assert tokenizer.eos_token_ids == {256, 257}
    assert tokenizer.encode("é<eot>", parse_special=True) == [0xC3, 0xA9, 257]


def test_a_piece_vocabulary_refuses_ids_that_it_does_not_have() -> None:
    with pytest.raises(TokenizerLoadError, match="token id 1"):
        PieceTokenizer([b"a"], special={1})
    with pytest.raises(TokenizerLoadError, match="empty"):
        PieceTokenizer([])
