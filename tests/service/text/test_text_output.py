from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.text import PieceTokenizer, StopMatcher, TextEvent, TextOutput, Tokenizer, UnknownTokenError

EOS = 4
TOKENIZER = PieceTokenizer([b"injury", b".", b" Alice", b"!", b"<eos>", b"\xe4\xb8", b"\xad"], special={EOS})


def whole(output: TextOutput, ids: list[int], stop_token_id: int | None = None) -> str:
    return "".join(output.push(i).text for i in ids) + output.finish(stop_token_id)


@pytest.mark.parametrize(
    ("include_stop", "keep_special", "text"),
    [
        (False, False, "injury."),
        (True, False, "injury."),
        (False, True, "injury."),
        (True, True, "injury.<eos>"),
    ],
)
def test_ending_at_a_special_stop_token_cuts_no_real_text(include_stop: bool, keep_special: bool, text: str) -> None:
    output = TextOutput(TOKENIZER, include_stop=include_stop, keep_special=keep_special)
    assert whole(output, [0, 1], EOS) == text


@pytest.mark.parametrize(("include_stop", "text"), [(False, "injury"), (True, "injury.")])
def test_an_ordinary_stop_token_is_text_only_if_the_stop_is_wanted(include_stop: bool, text: str) -> None:
    assert whole(TextOutput(TOKENIZER, include_stop=include_stop), [0], 1) == text


def test_an_end_of_sequence_token_that_is_passed_over_gives_no_text() -> None:
    assert whole(TextOutput(TOKENIZER), [0, EOS, 1]) == "injury."


def test_text_held_for_a_stop_comes_out_before_the_stop_token_s_own() -> None:
    output = TextOutput(TOKENIZER, ["Alice:"], include_stop=True)
    assert output.push(2) == TextEvent(" ", None)
    assert output.finish(3) == "Alice!"


def test_text_held_for_a_stop_comes_out_at_the_end() -> None:
    assert whole(TextOutput(TOKENIZER, ["Alice:"]), [2], EOS) == " Alice"
    assert whole(TextOutput(TOKENIZER, ["Alice:"]), [2]) == " Alice"


def test_an_incomplete_character_comes_out_at_the_end_behind_the_held_text() -> None:
    assert whole(TextOutput(TOKENIZER, ["Alice:"]), [2, 5]) == " Alice\ufffd"


def test_a_stop_string_is_reported_once_reached_and_ends_the_text() -> None:
    output = TextOutput(TOKENIZER, ["y."])
    assert output.push(0) == TextEvent("injur", None)
    assert output.push(1) == TextEvent("", "y.")
    assert output.stop_string == "y."
    assert output.push(0).text == ""
    assert output.finish(1) == ""


def test_the_stop_string_is_kept_if_wanted() -> None:
    output = TextOutput(TOKENIZER, ["Al"], include_stop=True)
    assert output.push(2) == TextEvent(" Al", "Al")
    assert output.finish() == ""


def test_a_stop_string_of_a_character_spread_over_tokens_is_found() -> None:
    output = TextOutput(TOKENIZER, ["中"])
    assert [output.push(i) for i in (5, 6)] == [TextEvent("", None), TextEvent("", "中")]


def test_a_stop_string_spelled_like_a_control_token_is_found_only_in_text_that_shows_it(smollm: Tokenizer) -> None:
    hi = smollm.encode("hi")
    assert [TextOutput(smollm, ["<|im_end|>"]).push(i) for i in [*hi, 2]][-1] == TextEvent("", None)
    kept = TextOutput(smollm, ["<|im_end|>"], keep_special=True)
    assert [kept.push(i) for i in [*hi, 2]] == [TextEvent("hi", None), TextEvent("", "<|im_end|>")]


def test_a_stop_string_written_in_ordinary_tokens_leaks_nothing(smollm: Tokenizer) -> None:
    ids = smollm.encode("ok<|im_end|> never")
    output = TextOutput(smollm, ["<|im_end|>"])
    assert "".join(output.push(i).text for i in ids) + output.finish() == "ok"
    assert output.stop_string == "<|im_end|>"


def test_finishing_twice_gives_the_rest_once() -> None:
    output = TextOutput(TOKENIZER, ["Alice:"])
    output.push(2)
    assert (output.finish(), output.finish()) == ("Alice", "")


def test_an_id_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(UnknownTokenError):
        TextOutput(TOKENIZER).push(99)


@settings(deadline=None, max_examples=200)
@given(
    ids=st.lists(st.integers(0, 49151), max_size=40),
    stops=st.lists(st.sampled_from(["e", "\n", " the", "ing", "\ufffd", "in the", "<|im_end|>"]), max_size=3),
    include_stop=st.booleans(),
    keep_special=st.booleans(),
)
def test_the_text_of_random_ids_equals_the_full_decode_up_to_its_first_stop(
    smollm: Tokenizer, ids: list[int], stops: list[str], include_stop: bool, keep_special: bool
) -> None:
    output = TextOutput(smollm, stops, include_stop=include_stop, keep_special=keep_special)
    once = StopMatcher(stops, include_stop=include_stop)
    text, stop = once.push(smollm.decode(ids, keep_special=keep_special))
    assert whole(output, ids) == text + once.flush()
    assert output.stop_string == stop
