"""Bad requests are refused by name, and hurt no running stream. Scripted tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.e2e.wire import Collected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from google.protobuf.descriptor import Descriptor

    from tests.e2e.process import Server

SCRIPT = {"step_ms": 2, "requests": {"running": {"tokens": list(b"abcdefghij"), "loop": True}}}
INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
OUT_OF_RANGE = {
    "temperature": [-0.1, 100.5],
    "top_p": [0.0, -1.0, 1.01],
    "min_p": [-0.01, 1.01],
    "frequency_penalty": [-2.1, 2.1],
    "presence_penalty": [-2.1, 2.1],
    "repetition_penalty": [0.0, -1.0, 10.1],
    "logit_bias": [-100.5, 100.5],
}
REFUSED: dict[str, tuple[dict[str, Any], grpc.StatusCode, str]] = {
    "no prompt": ({"text": None}, INVALID, "prompt"),
    "empty text": ({"text": ""}, INVALID, "text"),
    "no ids": ({"text": None, "token_ids": {}}, INVALID, "token_ids.ids"),
    "an id outside the vocabulary": ({"text": None, "token_ids": {"ids": [1, 258]}}, INVALID, "token_ids.ids[1]"),
    "a huge id": ({"text": None, "token_ids": {"ids": [2**32 - 1]}}, INVALID, "token_ids.ids[0]"),
    "text that fills the context": ({"text": "p" * 256}, INVALID, "text"),
    "ids that fill the context": ({"text": None, "token_ids": {"ids": [1] * 256}}, INVALID, "token_ids.ids"),
    "no max_tokens": ({"stop": {"max_tokens": 0}}, INVALID, "stop.max_tokens"),
    "33 stop strings": ({"stop": {"strings": ["s"] * 33}}, INVALID, "stop.strings"),
    "an empty stop string": ({"stop": {"strings": ["ok", ""]}}, INVALID, "stop.strings[1]"),
    "a long stop string": ({"stop": {"strings": ["é" * 513]}}, INVALID, "stop.strings[0]"),
    "129 stop ids": ({"stop": {"token_ids": [1] * 129}}, INVALID, "stop.token_ids"),
    "a stop id outside the vocabulary": ({"stop": {"token_ids": [258]}}, INVALID, "stop.token_ids[0]"),
    "129 continuations": ({"sampling": {"n": 129}}, INVALID, "sampling.n"),
    "a long request id": ({"request_id": "r" * 257}, INVALID, "request_id"),
    "a long salt": ({"cache": {"salt": "s" * 257}}, INVALID, "cache.salt"),
    "a bias outside the vocabulary": ({"sampling": {"logit_bias": {258: 1.0}}}, INVALID, "sampling.logit_bias[258]"),
    "an empty constraint": ({"constraint": {}}, INVALID, "constraint.kind"),
    "no choice": ({"constraint": {"choice": {}}}, INVALID, "constraint.choice.options"),
    "min_tokens over max_tokens": ({"stop": {"min_tokens": 3, "max_tokens": 2}}, INVALID, "stop.min_tokens"),
    "a conversation without messages": ({"text": None, "chat": {}}, INVALID, "chat.messages"),
    "frequency_penalty": ({"sampling": {"frequency_penalty": 1}}, UNIMPLEMENTED, "sampling.frequency_penalty"),
    "presence_penalty": ({"sampling": {"presence_penalty": 1}}, UNIMPLEMENTED, "sampling.presence_penalty"),
    "repetition_penalty": ({"sampling": {"repetition_penalty": 2}}, UNIMPLEMENTED, "sampling.repetition_penalty"),
    "logit_bias": ({"sampling": {"logit_bias": {1: 1.0}}}, UNIMPLEMENTED, "sampling.logit_bias"),
    "min_tokens": ({"stop": {"min_tokens": 1}}, UNIMPLEMENTED, "stop.min_tokens"),
    "logprobs": ({"output": {"logprobs": 0}}, UNIMPLEMENTED, "output.logprobs"),
    "prompt_logprobs": ({"output": {"prompt_logprobs": 0}}, UNIMPLEMENTED, "output.prompt_logprobs"),
    "a constraint": ({"constraint": {"regex": "a"}}, UNIMPLEMENTED, "constraint"),
}


@pytest.fixture(scope="module")
def server(start_shared: Callable[..., Server]) -> Server:
    return start_shared("--context", "256", script=SCRIPT)


@pytest.fixture
def running(server: Server) -> Iterator[None]:
    """A neighbour's stream, which must come through whole."""
    call = server.client.Generate(server.request("running", text="go", stop={"max_tokens": 200}), timeout=60)
    first = next(call)
    yield
    collected = Collected([first, *call])
    assert collected.text() == "abcdefghij" * 20


def refusal(call: Any) -> tuple[grpc.StatusCode, str, list[str]]:
    """Code, message and named fields of the status that a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    fields = []
    status = rpc_status.from_call(caught.value)
    for detail in () if status is None else status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            fields += [violation.field for violation in bad.field_violations]
    return caught.value.code(), caught.value.details(), fields


def float_fields(message: Descriptor, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every float field of a message, found through its descriptor."""
    for field in message.fields:
        here = (*path, field.name)
        kinds = (field, field.message_type.fields_by_name["value"]) if _is_map(field) else (field,)
        if any(kind.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE) for kind in kinds):
            yield here
        elif field.message_type is not None:
            yield from float_fields(field.message_type, here)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def with_float(request: Any, path: tuple[str, ...], value: float) -> Any:
    """Sets a float field by path; a map's at key 1."""
    for name in path[:-1]:
        request = getattr(request, name)
    if isinstance(getattr(request, path[-1]), float):
        setattr(request, path[-1], value)
    else:
        getattr(request, path[-1])[1] = value
    return request


@pytest.mark.usefixtures("running")
def test_every_float_field_refuses_what_is_no_number_or_out_of_range(server: Server) -> None:
    paths = list(float_fields(server.contract.GenerateRequest.DESCRIPTOR))
    assert {path[-1] for path in paths} == set(OUT_OF_RANGE)
    for path in paths:
        for value in (math.nan, math.inf, -math.inf, *OUT_OF_RANGE[path[-1]]):
            request = server.request(text="go")
            with_float(request, path, value)
            code, message, fields = refusal(server.client.Generate(request, timeout=10))
            assert code is INVALID, (path, value)
            (field,) = fields
            assert field.startswith(".".join(path)), (path, value)
            assert field in message


@pytest.mark.usefixtures("running")
def test_every_other_field_out_of_range_or_not_served_is_refused_by_name(server: Server) -> None:
    for name, (fields, code, field) in REFUSED.items():
        request = server.request(
            **{key: value for key, value in ({"text": "go"} | fields).items() if value is not None}
        )
        found = refusal(server.client.Generate(request, timeout=10))
        assert (found[0], found[2]) == (code, [field]), name
        assert field in found[1]


def test_all_bad_fields_are_named_at_once(server: Server) -> None:
    request = server.request(text="", sampling={"temperature": -1, "top_p": 2}, stop={"max_tokens": 0})
    _, _, fields = refusal(server.client.Generate(request, timeout=10))
    assert set(fields) == {"text", "sampling.temperature", "sampling.top_p", "stop.max_tokens"}


def test_neutral_values_of_fields_that_are_not_served_are_accepted(server: Server) -> None:
    sampling = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "top_k": 2**32 - 1}
    request = server.request(text="go", sampling=sampling, stop={"max_tokens": 1})
    assert Collected(server.client.Generate(request, timeout=10)).finished


def test_another_model_is_not_found_everywhere(server: Server) -> None:
    contract, client = server.contract, server.client
    assert (
        refusal(client.Generate(server.request(text="go", model="other"), timeout=10))[0] is grpc.StatusCode.NOT_FOUND
    )
    for call in (
        lambda: client.GetModel(contract.GetModelRequest(model="other")),
        lambda: client.Tokenize(contract.TokenizeRequest(model="other")),
        lambda: client.Detokenize(contract.DetokenizeRequest(model="other")),
        lambda: client.RenderChat(contract.RenderChatRequest(model="other")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "scripted" in caught.value.details()


def test_a_conversation_needs_a_chat_template(server: Server) -> None:
    request = server.request(chat={"messages": [{"role": "user", "content": "hi"}]})
    assert refusal(server.client.Generate(request, timeout=10))[0] is grpc.StatusCode.FAILED_PRECONDITION


def test_more_than_the_context_has_left_is_clamped_and_ends_with_length(server: Server) -> None:
    request = server.request("running", text="p" * 250, stop={"max_tokens": 1000})
    answer = Collected(server.client.Generate(request, timeout=10))
    assert answer.finished[0].usage.completion_tokens == 6
    assert answer.finished[0].reason == 2


def test_a_prompt_that_leaves_room_for_one_token_gets_one(server: Server) -> None:
    answer = Collected(server.client.Generate(server.request("running", text="p" * 255), timeout=10))
    assert answer.text() == "a"
    assert answer.finished[0].reason == 2
