"""What reaches a client of the text: every character once, nothing of a stop, usage that counts. Scripted tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.wire import Collected

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.process import Server

EOS = 256
PIECES = [" Alice", "!", "?\n", "UNO DUE TRE", "<", "|im_end", "|>", "injury", ".", " is", "A 世", "\ufffd"]
ID = {piece: EOS + 1 + position for position, piece in enumerate(PIECES)}
REPLACEMENT = list("\ufffd".encode())

BYTES = {
    "bytes-of-one-character": list("中".encode()),
    "bytes-of-many": list("né 世界 🙂👩‍👩‍👧 ok".encode()),
    "bytes-real-replacement-character": [ID["A 世"], *REPLACEMENT, ord("a"), *REPLACEMENT],
    "bytes-broken-then-ascii": [ID["A 世"], 0xE4, ord("a"), ID["\ufffd"], ord("b")],
    "bytes-broken-at-the-end": [ord("x"), 0xF0, 0x9F],
}
SCRIPT = {
    "vocabulary": [*({"hex": f"{byte:02x}"} for byte in range(256)), {"special": "<eos>"}, *PIECES],
    "eos": [EOS],
    "requests": {
        **{name: {"tokens": tokens} for name, tokens in BYTES.items()},
        "alice*": {"tokens": [ID[" Alice"], ID["!"]]},
        "question": {"tokens": [ID["?\n"], ord("x")]},
        "uno": {"tokens": [ID["UNO DUE TRE"]]},
        "marker": {"tokens": [*b"Hi", ID["<"], ID["|im_end"], ID["|>"], *b"leak"]},
        "spaces": {"tokens": [*b"Paris", ID[" is"], ord(" "), *b" leading", ord(" "), ord("x")]},
        "injury*": {"tokens": [ID["injury"], ID["."]]},
        "loop": {"tokens": [97], "loop": True},
        "three": {"tokens": [[97], list(b"bcde"), list(b"fghijklmn")]},
    },
}


@pytest.fixture(scope="module")
def server(start_shared: Callable[..., Server]) -> Server:
    return start_shared("--chunk-tokens", "16", script=SCRIPT)


def collect(server: Server, request_id: str, *, text: str = "go", **fields: Any) -> Collected:
    return Collected(server.client.Generate(server.request(request_id, text=text, **fields), timeout=20))


def decoded(tokens: list[int]) -> str:
    return b"".join(PIECES[i - EOS - 1].encode() if i > EOS else bytes([i]) for i in tokens).decode(errors="replace")


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("token_ids", [False, True])
def test_concatenated_deltas_equal_the_whole_decode(server: Server, name: str, token_ids: bool) -> None:
    answer = collect(server, name, output={"token_ids": token_ids})
    assert answer.text() == decoded(BYTES[name])
    assert answer.ids() == ([*BYTES[name], EOS] if token_ids else [])


def test_a_character_of_three_tokens_arrives_once_and_whole(server: Server) -> None:
    answer = collect(server, "bytes-of-one-character")
    assert [delta.text for delta in answer.deltas] == ["中"]


def test_token_ids_are_not_held_back_with_the_text(server: Server) -> None:
    answer = collect(server, "bytes-of-one-character", output={"token_ids": True})
    assert answer.deltas[0].text == ""
    assert answer.deltas[0].token_ids[0] == 0xE4


def test_leading_spaces_survive(server: Server) -> None:
    assert collect(server, "spaces").text() == "Paris is  leading x"


def test_text_held_for_a_stop_string_is_sent_once_when_it_does_not_come(server: Server) -> None:
    answer = collect(server, "alice", stop={"strings": ["\n", "Alice:"]})
    assert answer.text() == " Alice!"
    assert answer.finished[0].stop_token_id == EOS


def test_a_stop_string_at_the_end_of_a_token_cuts_only_itself(server: Server) -> None:
    answer = collect(server, "question", stop={"strings": ["\n"]}, output={"token_ids": True})
    assert answer.text() == "?"
    assert answer.finished[0].stop_string == "\n"
    assert answer.finished[0].reason == 1
    assert answer.ids() == [ID["?\n"]]
    assert answer.finished[0].usage.completion_tokens == 1


def test_include_stop_keeps_the_stop_string(server: Server) -> None:
    assert collect(server, "question", stop={"strings": ["\n"], "include_stop": True}).text() == "?\n"


def test_an_unfinished_stop_string_does_not_swallow_the_end_of_the_text(server: Server) -> None:
    assert collect(server, "uno", stop={"strings": ["TRE\nAAAA"]}).text() == "UNO DUE TRE"


def test_a_stop_string_split_over_tokens_leaks_nothing(server: Server) -> None:
    answer = collect(server, "marker", stop={"strings": ["<|im_end|>"]})
    assert answer.text() == "Hi"
    assert answer.finished[0].usage.completion_tokens == 5


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("keep_special_tokens", [False, True])
def test_stopping_on_a_special_token_cuts_no_text(
    server: Server, include_stop: bool, keep_special_tokens: bool
) -> None:
    answer = collect(
        server,
        "injury",
        stop={"include_stop": include_stop},
        output={"token_ids": True, "keep_special_tokens": keep_special_tokens},
    )
    assert answer.text() == "injury." + ("<eos>" if include_stop and keep_special_tokens else "")
    assert answer.ids() == [ID["injury"], ID["."], EOS]
    assert answer.finished[0].stop_token_id == EOS
    assert answer.finished[0].usage.completion_tokens == 3


def test_a_stop_id_ends_the_stream_and_its_text_is_cut(server: Server) -> None:
    answer = collect(server, "injury-by-id", stop={"token_ids": [ID["."]]})
    assert answer.text() == "injury"
    assert answer.finished[0].stop_token_id == ID["."]


def test_ignore_eos_goes_on_to_max_tokens(server: Server) -> None:
    answer = collect(server, "alice-on", stop={"ignore_eos": True, "max_tokens": 6}, output={"token_ids": True})
    assert answer.ids() == [ID[" Alice"], ID["!"], EOS, EOS, EOS, EOS]
    assert answer.text() == " Alice!"
    assert answer.finished[0].reason == 2
    assert answer.finished[0].WhichOneof("matched") is None


def test_a_chunked_prompt_is_counted_once_and_makes_no_empty_message(server: Server) -> None:
    responses = list(server.client.Generate(server.request("loop", text="p" * 40, stop={"max_tokens": 1}), timeout=20))
    assert [response.WhichOneof("event") for response in responses] == ["started", "delta", "finished"]
    usage = responses[-1].finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (40, 1)
    assert usage.HasField("queue")
    assert usage.prefill.ToNanoseconds() > 0


def test_continuations_finish_apart_and_the_prompt_is_counted_in_the_first(server: Server) -> None:
    answer = collect(server, "three", sampling={"n": 3})
    assert [answer.text(index) for index in range(3)] == ["a", "bcde", "fghijklmn"]
    assert [answer.finished[index].usage.prompt_tokens for index in range(3)] == [2, 0, 0]
    assert [answer.finished[index].usage.completion_tokens for index in range(3)] == [2, 5, 10]


def test_the_pool_answers_alike_cold_warm_salted_and_bypassed(server: Server) -> None:
    prompt = "The quick brown fox jumps over the lazy dog, twice a day."
    greedy: dict[str, Any] = {"text": prompt, "stop": {"max_tokens": 40}, "sampling": {"temperature": 0}}
    cold, warm = (collect(server, "", **greedy) for _ in range(2))
    assert cold.text() == warm.text() != ""
    assert cold.started.cached_tokens == 0
    assert warm.started.cached_tokens == 48
    assert warm.finished[0].usage.cached_tokens == 48
    salted = collect(server, "", **greedy, cache={"salt": "other"})
    assert (salted.started.cached_tokens, salted.text()) == (0, cold.text())
    bypassed = collect(server, "", **greedy, cache={"bypass": True})
    assert (bypassed.started.cached_tokens, bypassed.text()) == (0, cold.text())


def test_a_seed_repeats_and_no_seed_does_not(server: Server) -> None:
    first, again = (collect(server, "", stop={"max_tokens": 20}, sampling={"seed": 7}).text() for _ in range(2))
    assert first == again
    assert len({collect(server, "", stop={"max_tokens": 20}).text() for _ in range(3)}) == 3
