from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.philox import philox4x32, uniforms

# Known answers that Random123, the authors' library, is tested with (philox 4x32, 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def one(value: int) -> np.ndarray:
    return np.array([value], np.uint64)


def draw(seed: int, index: int, position: int) -> float:
    return float(uniforms(one(seed), np.array([index], np.int32), np.array([position], np.int32))[0])


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_block_function_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (one(word) for word in counter)
    found = philox4x32(one(key[0] | key[1] << 32), (c0, c1, c2, c3))
    assert tuple(int(word[0]) for word in found) == answer


def test_a_uniform_is_the_first_53_bits_of_its_block() -> None:
    high, low = KNOWN[0][2][:2]
    assert draw(0, 0, 0) == (high << 21 | low >> 11) / 2**53


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 99), st.integers(0, 2**31 - 1)), min_size=1))
def test_a_uniform_depends_on_its_own_row_alone(rows: list[tuple[int, int, int]]) -> None:
    seeds, indices, positions = zip(*rows, strict=True)
    together = uniforms(np.array(seeds, np.uint64), np.array(indices, np.int32), np.array(positions, np.int32))
    assert together.tolist() == [draw(*row) for row in rows]
    assert np.all((together >= 0) & (together < 1))


def test_seed_index_and_position_each_change_the_draw() -> None:
    assert len({draw(1, 2, 3), draw(2, 2, 3), draw(1, 3, 3), draw(1, 2, 4), draw(1 + 2**32, 2, 3), draw(1, 3, 2)}) == 6


def test_uniforms_of_successive_positions_are_uniform() -> None:
    n = 20_000
    draws = uniforms(np.full(n, 42, np.uint64), np.zeros(n, np.int32), np.arange(n, dtype=np.int32))
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 148.2  # chi-square, 99 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
