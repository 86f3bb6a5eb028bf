from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixd.v1 import generate_pb2 as pb

from scheduler.errors import OutgrownError
from scheduler.request import Outcome, Reason
from service.stream import DELTA_TOKENS, TokenStream, aborted_early
from service.text import PieceTokenizer, TextOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

EOS = 256
TOKENIZER = PieceTokenizer.bytewise()


class Clock:
    """Time that a test turns by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_stream(n: int = 1, *, stop: Sequence[str] = (), want_ids: bool = False, **kwargs: Any) -> TokenStream:
    outputs = [TextOutput(TOKENIZER, stop) for _ in range(n)]
    return TokenStream(outputs, pb.Started(request_id="r", prompt_tokens=5), want_ids=want_ids, **kwargs)


def outcome(reason: Reason = Reason.LENGTH, stop_token_id: int | None = None, completion_tokens: int = 1) -> Outcome:
    return Outcome(reason, stop_token_id, 5, 4, completion_tokens, 0.25, 0.5, 1.5)


def feed(stream: TokenStream, data: bytes, index: int = 0) -> None:
    for token_id in data:
        assert not stream.token(index, token_id)


def text_of(responses: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(r.delta.text for r in responses if r.HasField("delta") and r.delta.index == index)


def ids_of(responses: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    return [i for r in responses if r.HasField("delta") and r.delta.index == index for i in r.delta.token_ids]


def kinds(responses: list[pb.GenerateResponse]) -> list[str | None]:
    return [response.WhichOneof("event") for response in responses]


def test_what_gathered_while_nobody_took_is_one_delta_for_each_index() -> None:
    stream = make_stream(2)
    stream.started(4)
    feed(stream, b"abc", 0)
    feed(stream, b"xy", 1)
    responses = stream.take()
    assert kinds(responses) == ["started", "delta", "delta"]
    assert responses[0].started.cached_tokens == 4
    assert [text_of(responses, index) for index in range(2)] == ["abc", "xy"]
    assert not stream.ended


async def test_a_token_without_text_wakes_the_writer_only_if_ids_are_wanted() -> None:
    for want_ids in (False, True):
        stream = make_stream(want_ids=want_ids)
        stream.token(0, 0xE4)
        assert kinds(stream.take()) == (["delta"] if want_ids else [])


@given(st.text(max_size=40), st.data(), st.booleans())
def test_deltas_taken_at_any_moment_add_up_and_are_never_empty(text: str, data: st.DataObject, want_ids: bool) -> None:
    stream = make_stream(want_ids=want_ids)
    taken: list[pb.GenerateResponse] = []
    for token_id in text.encode():
        stream.token(0, token_id)
        if data.draw(st.booleans()):
            taken += stream.take()
    stream.finished(0, outcome(Reason.STOP, EOS))
    taken += stream.take()
    assert text_of(taken) == text
    assert ids_of(taken) == ([*text.encode(), EOS] if want_ids else [])
    assert all(r.delta.text or r.delta.token_ids for r in taken if r.HasField("delta"))
    assert kinds(taken)[-1] == "finished"
    assert stream.take() == []


def test_a_backlog_is_kept_once_and_leaves_in_bounded_messages() -> None:
    stream = make_stream(want_ids=True)
    feed(stream, b"a" * (3 * DELTA_TOKENS + 1))
    responses = stream.take()
    assert [len(response.delta.token_ids) for response in responses] == [DELTA_TOKENS] * 3 + [1]


def test_a_stop_string_ends_the_index_with_the_text_before_it_and_the_ids_up_to_it() -> None:
    stream = make_stream(stop=["<|end|>"], want_ids=True)
    feed(stream, b"Hi<|end|")
    assert stream.token(0, ord(">"))
    stream.finished(0, outcome(Reason.STOP, completion_tokens=9))
    responses = stream.take()
    finished = responses[-1].finished
    assert text_of(responses) == "Hi"
    assert ids_of(responses) == list(b"Hi<|end|>")
    assert (finished.reason, finished.stop_string) == (pb.FINISH_REASON_STOP, "<|end|>")


def test_text_held_for_a_stop_string_comes_with_the_end() -> None:
    stream = make_stream(stop=["abcd"])
    feed(stream, b"abc")
    assert stream.take() == []
    stream.finished(0, outcome())
    responses = stream.take()
    assert text_of(responses) == "abc"
    assert responses[-1].finished.WhichOneof("matched") is None


def test_an_aborted_index_says_nothing_of_a_stop() -> None:
    stream = make_stream()
    stream.finished(0, outcome(Reason.ABORTED))
    (response,) = stream.take()
    assert response.finished.reason == pb.FINISH_REASON_ABORTED
    assert response.finished.WhichOneof("matched") is None


def test_a_failure_comes_after_all_that_was_generated() -> None:
    stream = make_stream(2, stop=["abcd"])
    feed(stream, b"xabc", 0)
    stream.finished(1, outcome())
    error = OutgrownError("outgrown")
    stream.failed(error)
    responses = stream.take()
    assert stream.ended
    assert stream.error is error
    assert text_of(responses) == "xabc"
    assert [r.finished.index for r in responses if r.HasField("finished")] == [1]


def test_usage_counts_the_prompt_in_the_first_index_alone() -> None:
    stream = make_stream(2)
    stream.finished(0, outcome(completion_tokens=3))
    stream.finished(1, outcome(completion_tokens=7))
    first, second = (response.finished.usage for response in stream.take())
    assert (first.prompt_tokens, first.cached_tokens, first.completion_tokens) == (5, 4, 3)
    assert (second.prompt_tokens, second.cached_tokens, second.completion_tokens) == (0, 0, 7)
    assert [d.ToNanoseconds() for d in (first.queue, first.prefill, first.decode)] == [250e6, 500e6, 1500e6]


def test_times_and_tokens_are_kept_for_the_log() -> None:
    clock = Clock()
    stream = make_stream(clock=clock)
    clock.now = 1.0
    stream.started(4)
    for clock.now in (2.0, 3.0):
        stream.token(0, ord("a"))
    clock.now = 4.0
    stream.finished(0, outcome(Reason.STOP, EOS))
    assert (stream.admitted, stream.first_token, stream.last_token) == (1.0, 2.0, 4.0)
    assert (stream.prompt_tokens, stream.cached_tokens, stream.completion_tokens) == (5, 4, 3)


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_aborted_early_still_ends_each_index(n: int) -> None:
    responses = aborted_early(n)
    assert [response.finished.index for response in responses] == list(range(n))
    assert {response.finished.reason for response in responses} == {pb.FINISH_REASON_ABORTED}
