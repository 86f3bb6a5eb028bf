"""What ListPrefixes makes of the cache's hottest prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import HotPrefix
from service.namespace import Namespace
from service.prefixes import begin_of, describe, parents_of
from service.text import PieceTokenizer
from service.visible import cut, visible

TOKENIZER = PieceTokenizer.bytewise()
SALTS = (Namespace("g", "").encode(), Namespace("g", "mine").encode())


def hot(ids: bytes | tuple[int, ...], namespace: bytes = SALTS[0], hits: int = 0) -> HotPrefix:
    return HotPrefix(namespace, np.array(list(ids), np.int32), np.arange(len(ids), dtype=np.int32), hits)


@given(
    st.lists(
        st.tuples(st.sampled_from(SALTS), st.lists(st.sampled_from([0, 1, 256, 2**31 - 1]), max_size=6).map(tuple)),
        unique=True,
        max_size=20,
    )
)
def test_the_parent_is_the_longest_other_prefix_that_is_extended(keys: list[tuple[bytes, tuple[int, ...]]]) -> None:
    for (salt, ids), parent in zip(keys, parents_of([hot(ids, salt) for salt, ids in keys]), strict=True):
        extended = [
            (len(other), index)
            for index, (its_salt, other) in enumerate(keys)
            if its_salt == salt and len(other) < len(ids) and ids[: len(other)] == other
        ]
        assert parent == (max(extended)[1] if extended else -1)


def test_each_prefix_shows_what_it_adds_to_its_parent() -> None:
    prefixes = [
        hot(b"You are helpful.", hits=3),
        hot(b"You are", SALTS[1], 2),
        hot(b"You are helpful. Be brief.", hits=1),
    ]
    described = describe(prefixes, TOKENIZER, 80)
    assert [(p.salt, p.tokens, p.hits, p.parent, p.text) for p in described] == [
        ("", 16, 3, -1, "You are helpful."),
        ("mine", 7, 2, -1, "You are"),
        ("", 26, 1, 0, " Be brief."),
    ]


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        ("hello", 5, "hello"),
        ("hello", 4, "hell\u2026"),
        ("a\u00e9\u4e2d", 6, "a\u00e9\u4e2d"),
        ("a\u00e9\u4e2d", 5, "a\u00e9\u2026"),
        ("a\u00e9\u4e2d", 2, "a\u2026"),
        ("a\nb", 3, "a\\n\u2026"),
        ("a\nb", 2, "a\u2026"),
        ("\x1b[2J", 80, "\\x1b[2J"),
        ("\u202egnp", 80, "\\u202egnp"),
        ("\x9b1m", 80, "\\x9b1m"),
    ],
)
def test_text_is_cut_between_characters_and_spells_what_does_not_print(text: str, limit: int, shown: str) -> None:
    assert begin_of(np.frombuffer(text.encode(), np.uint8).astype(np.int32), TOKENIZER, limit) == shown


def test_of_a_long_prefix_only_what_is_shown_is_decoded() -> None:
    ids = np.array([97] * 20 + [100_000], np.int32)
    assert begin_of(ids, TOKENIZER, 8) == "a" * 8 + "\u2026"


def test_half_a_character_is_a_replacement_and_a_control_token_is_spelled() -> None:
    assert begin_of(np.array([0xB8, 0xAD, 97, 256], np.int32), TOKENIZER, 80) == "\ufffd\ufffda<eos>"


@given(st.text(), st.integers(0, 60))
def test_a_cut_is_the_longest_begin_that_fits_and_prints(text: str, limit: int) -> None:
    shown, whole = cut(text, limit)
    assert len(shown.encode(errors="replace")) <= limit
    assert visible(text).startswith(shown)
    assert whole is (shown == visible(text))
    assert shown.isprintable()
