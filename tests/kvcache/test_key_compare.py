from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvcache import fast_compare_key
from kvcache._core import compare_paths, compare_with

PATHS = compare_paths()
DTYPES = [np.int32, np.int64]
LONGEST_LANES = 16

every_path = pytest.mark.parametrize("path", PATHS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def common_prefix(x: np.ndarray, y: np.ndarray) -> int:
    n = min(len(x), len(y))
    differ = np.flatnonzero(x[:n] != y[:n])
    return int(differ[0]) if len(differ) else n


def test_the_portable_path_is_always_there_and_the_last_choice():
    assert PATHS[-1] == "portable"
    assert len(set(PATHS)) == len(PATHS)


def test_a_path_that_this_machine_lacks_is_a_value_error():
    ids = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="no comparison path 'abacus'"):
        compare_with("abacus", ids, ids)


@every_path
@every_dtype
def test_an_empty_array_shares_nothing(path: str, dtype: type):
    empty, some = np.empty(0, dtype), np.arange(40, dtype=dtype)
    assert compare_with(path, empty, empty) == 0
    assert compare_with(path, empty, some) == 0
    assert compare_with(path, some, empty) == 0


@every_path
@every_dtype
def test_the_shorter_array_bounds_the_prefix(path: str, dtype: type):
    long = np.arange(3 * LONGEST_LANES + 1, dtype=dtype)
    for n in range(len(long) + 1):
        assert compare_with(path, long[:n], long) == n
        assert compare_with(path, long, long[:n]) == n


@every_path
@every_dtype
def test_a_difference_at_every_lane_of_every_length_is_found(path: str, dtype: type):
    for n in range(1, 3 * LONGEST_LANES + 2):
        x = np.arange(n, dtype=dtype)
        for at in range(n):
            y = x.copy()
            y[at:] += 1
            assert compare_with(path, x, y) == at


@every_path
@every_dtype
def test_what_lies_beyond_either_end_is_not_looked_at(path: str, dtype: type):
    x, y = np.arange(64, dtype=dtype), np.arange(64, dtype=dtype)
    for start in range(5):
        for stop in range(start, 64):
            y[stop:] = -1
            y[:start] = -1
            assert compare_with(path, x[start:stop], y[start:stop]) == stop - start
            y[:] = x


@every_path
def test_each_half_of_a_64_bit_id_counts(path: str):
    x = np.zeros(20, np.int64)
    for at in range(20):
        for bit in (0, 31, 32, 63):
            y = x.copy()
            y.view(np.uint64)[at] = np.uint64(1) << np.uint64(bit)
            assert compare_with(path, x, y) == at


@every_dtype
def test_only_the_first_of_many_differences_counts(dtype: type):
    x, y = np.zeros(100, dtype), np.zeros(100, dtype)
    y[[37, 38, 60, 99]] = 5
    assert fast_compare_key(x, y) == 37


def test_read_only_arrays_are_compared():
    x, y = np.arange(9, dtype=np.int32), np.arange(9, dtype=np.int32)
    y.flags.writeable = False
    assert fast_compare_key(x, y) == 9
    assert fast_compare_key(y, y) == 9


def test_unaligned_arrays_are_compared():
    data = bytearray(1) + np.arange(33, dtype=np.int32).tobytes()
    unaligned = np.frombuffer(data, np.int32, offset=1)
    for path in PATHS:
        assert compare_with(path, unaligned, np.arange(33, dtype=np.int32)) == 33


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64, np.int16, np.int8, np.float32, np.float64, np.bool_, ">i4"])
def test_any_other_dtype_is_a_type_error(dtype: object):
    wrong, right = np.zeros(4, dtype), np.zeros(4, np.int32)
    for x, y in [(wrong, right), (right, wrong), (wrong, wrong)]:
        with pytest.raises(TypeError):
            fast_compare_key(x, y)


def test_mixed_dtypes_are_a_type_error():
    narrow, wide = np.zeros(4, np.int32), np.zeros(4, np.int64)
    for x, y in [(narrow, wide), (wide, narrow)]:
        with pytest.raises(TypeError, match="same dtype"):
            fast_compare_key(x, y)


@every_dtype
def test_any_other_shape_or_stride_is_a_type_error(dtype: type):
    right = np.zeros(8, dtype)
    for wrong in [right.reshape(2, 4), right.reshape(1, 8), np.array(3, dtype)]:
        with pytest.raises(TypeError, match="one-dimensional"):
            fast_compare_key(right, wrong)
    for wrong in [right[::2], right[::-1], right.reshape(2, 4)[:, 0], np.broadcast_to(dtype(1), 8)]:
        with pytest.raises(TypeError, match="contiguous"):
            fast_compare_key(wrong, right)


@pytest.mark.parametrize("wrong", [None, 3, "ids", b"1234", [1, 2], (1, 2), np.int32(1), object()])
def test_what_is_no_array_is_a_type_error(wrong: object):
    right = np.zeros(4, np.int32)
    for x, y in [(wrong, right), (right, wrong)]:
        with pytest.raises(TypeError):
            fast_compare_key(x, y)  # type: ignore[arg-type]


@settings(deadline=None, derandomize=True)
@given(data=st.data())
def test_every_path_agrees_with_numpy(data: st.DataObject):
    dtype = data.draw(st.sampled_from(DTYPES))
    ids = st.integers(0, 3) | st.integers(np.iinfo(dtype).min, np.iinfo(dtype).max)
    shared = data.draw(arrays(dtype, st.integers(0, 70), elements=ids))
    x = np.concatenate([shared, data.draw(arrays(dtype, st.integers(0, 20), elements=ids))])
    y = np.concatenate([shared, data.draw(arrays(dtype, st.integers(0, 20), elements=ids))])
    expected = common_prefix(x, y)
    assert fast_compare_key(x, y) == expected
    for path in PATHS:
        assert compare_with(path, x, y) == expected
