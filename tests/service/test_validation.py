from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st
from radixd.v1 import generate_pb2 as pb

from kvcache import RadixCache
from service.errors import InvalidRequestError, NotServedError
from service.validation import (
    FLOAT_RANGES,
    Checked,
    Limits,
    check_chat,
    check_ids,
    check_request,
    fit_prompt,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import Descriptor

LIMITS = Limits(vocab_size=100, context_length=64, eos_token_ids=frozenset({2}))
FLOAT_TYPES = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)
PATHS = sorted(FLOAT_RANGES)


def float_paths(message: Descriptor, prefix: str = "") -> Iterator[str]:
    for field in message.fields:
        path = f"{prefix}{field.name}"
        if field.type in FLOAT_TYPES:
            yield path
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].type in FLOAT_TYPES:
                yield path
        elif field.message_type is not None:
            yield from float_paths(field.message_type, f"{path}.")


def with_float(path: str, value: float) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="go")
    name = path.removeprefix("sampling.")
    if name == "logit_bias":
        request.sampling.logit_bias[7] = value
    else:
        setattr(request.sampling, name, value)
    return request


def check(**fields: Any) -> Checked:
    return check_request(pb.GenerateRequest(**({"text": "go"} | fields)), LIMITS)


def bad_fields(request: pb.GenerateRequest) -> list[str]:
    try:
        check_request(request, LIMITS)
    except InvalidRequestError as error:
        return [violation.field for violation in error.violations]
    except NotServedError:
        pass
    return []


def test_no_float_field_of_the_request_is_forgotten() -> None:
    assert set(float_paths(pb.GenerateRequest.DESCRIPTOR)) == set(FLOAT_RANGES)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_refused_in_every_float_field(path: str, value: float) -> None:
    (field,) = bad_fields(with_float(path, value))
    assert field.startswith(path)


@given(path=st.sampled_from(PATHS), value=st.floats(width=32))
def test_a_float_is_accepted_exactly_within_its_range(path: str, value: float) -> None:
    allowed = FLOAT_RANGES[path]
    inside = allowed.low <= value <= allowed.high and not (allowed.low_open and value == allowed.low)
    assert bool(bad_fields(with_float(path, value))) is not inside


def test_the_ends_of_a_range_belong_to_it_unless_it_is_open() -> None:
    for path, allowed in FLOAT_RANGES.items():
        assert bool(bad_fields(with_float(path, allowed.low))) is allowed.low_open
        assert not bad_fields(with_float(path, allowed.high))


def test_every_default_is_filled_in() -> None:
    checked = check()
    sampling = checked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert (checked.n, checked.max_tokens, checked.stop_ids, checked.stop_strings) == (1, None, frozenset({2}), ())


def test_an_explicit_zero_temperature_is_greedy_and_not_the_default() -> None:
    assert check(sampling={"temperature": 0}).sampling.temperature == 0


def test_each_request_without_a_seed_gets_its_own_and_an_explicit_zero_is_one() -> None:
    assert check().sampling.seed != check().sampling.seed
    assert check(sampling={"seed": 0}).sampling.seed == 0


def test_stop_ids_stand_beside_the_models_own_unless_these_are_ignored() -> None:
    assert check(stop={"token_ids": [5]}).stop_ids == {2, 5}
    assert check(stop={"token_ids": [5], "ignore_eos": True}).stop_ids == {5}


def test_a_top_k_beyond_the_vocabulary_is_the_vocabulary() -> None:
    assert check(sampling={"top_k": 2**32 - 1}).sampling.top_k == 100


@given(st.integers(1, 63), st.none() | st.integers(1, 2**32 - 1))
def test_output_is_clamped_to_what_the_context_has_left(length: int, max_tokens: int | None) -> None:
    room = fit_prompt("text", length, max_tokens, LIMITS)
    assert 1 <= room <= 64 - length
    assert room == 64 - length or room == max_tokens


@pytest.mark.parametrize("length", [0, 64, 1000])
def test_a_prompt_that_is_empty_or_leaves_no_room_is_refused(length: int) -> None:
    with pytest.raises(InvalidRequestError, match="token_ids"):
        fit_prompt("token_ids.ids", length, 1, LIMITS)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_are_taken_as_they_are_or_the_first_outside_is_named(ids: list[int]) -> None:
    outside = [position for position, i in enumerate(ids) if i >= 100]
    if outside:
        with pytest.raises(InvalidRequestError) as caught:
            check_ids("ids", ids, 100)
        assert caught.value.violations[0].field == f"ids[{outside[0]}]"
    else:
        array = check_ids("ids", ids, 100)
        assert array.dtype == np.int32
        assert array.tolist() == ids


def test_an_empty_role_is_refused_by_position() -> None:
    chat = pb.Chat(messages=[{"role": "user", "content": ""}, {"role": "", "content": "x"}])
    with pytest.raises(InvalidRequestError, match=r"chat\.messages\[1\]\.role"):
        check_chat(chat)


def test_what_other_weights_or_another_salt_computed_is_never_found() -> None:
    cache = RadixCache(1)
    ids = np.arange(8, dtype=np.int32)
    reloaded = dataclasses.replace(LIMITS, generation="reloaded")
    request, salted = pb.GenerateRequest(text="go"), pb.GenerateRequest(text="go", cache={"salt": "mine"})
    cache.insert_prefix(ids, ids, namespace=check_request(request, LIMITS).namespace)
    found = [
        cache.match_prefix(ids, namespace=check_request(asked, limits).namespace).cached_len
        for asked, limits in ((request, LIMITS), (request, reloaded), (salted, LIMITS))
    ]
    assert found == [8, 0, 0]


def test_a_stop_id_outside_the_vocabulary_is_named_with_its_value() -> None:
    request = pb.GenerateRequest(text="go", stop={"token_ids": [1, 4711]})
    with pytest.raises(InvalidRequestError, match=r"stop\.token_ids\[1\]: 4711 is outside"):
        check_request(request, LIMITS)


def test_of_too_many_entries_only_the_number_is_told() -> None:
    request = pb.GenerateRequest(text="go", stop={"strings": [""] * 100_000, "token_ids": [100] * 100_000})
    assert len(bad_fields(request)) <= 2 + 32 + 128
