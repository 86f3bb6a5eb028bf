from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base import SamplingRows
from engine.philox import uniforms
from engine.sampling import sample

INF = float("inf")


@dataclass(frozen=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    index: int = 0
    position: int = 0


def rows_of(rows: list[Row]) -> SamplingRows:
    def column(name: str, dtype: type) -> npt.NDArray[Any]:
        return np.array([getattr(row, name) for row in rows], dtype)

    return SamplingRows(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        seed=column("seed", np.uint64),
        index=column("index", np.int32),
        position=column("position", np.int32),
    )


def draw(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    return sample(logits, rows_of(rows)).tokens.tolist()


def draws(scores: list[float], row: Row, count: int) -> npt.NDArray[np.int64]:
    """``count`` draws at successive positions."""
    logits = torch.tensor(scores).expand(count, -1)
    return np.array(draw(logits, [replace(row, position=i) for i in range(count)]))


def probabilities(scores: list[float], row: Row) -> npt.NDArray[np.float64]:
    """The definition, in float64 and in loops: filters in order, ties at a cut to the lower id."""
    scaled = np.array(scores, np.float64) / np.float64(np.float32(row.temperature))
    weights = np.exp(scaled - scaled.max())
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if row.top_k:
        order = order[: row.top_k]
    if row.top_p < 1:
        total, mass, kept = weights[order].sum(), 0.0, []
        for i in order:
            kept.append(i)
            mass += weights[i]
            if mass >= np.float64(np.float32(row.top_p)) * total:
                break
        order = kept
    order = [i for i in order if weights[i] >= np.float32(row.min_p) * weights.max()]
    out = np.zeros(len(scores))
    out[order] = weights[order]
    return out / out.sum()


FILTERS = [
    Row(),
    Row(temperature=0.5),
    Row(temperature=1.7, top_k=5),
    Row(top_p=0.8),
    Row(min_p=0.1),
    Row(temperature=0.9, top_k=7, top_p=0.85, min_p=0.05),
]


@pytest.mark.parametrize("row", FILTERS)
def test_draws_follow_the_distribution(row: Row) -> None:
    scores = np.random.default_rng(5).normal(0, 1.5, 12).astype(np.float32).tolist()
    count = 20_000
    expected = probabilities(scores, row)
    found = np.bincount(draws(scores, replace(row, seed=11), count), minlength=12)
    assert found[expected == 0].sum() == 0
    likely = expected > 0
    statistic = ((found - count * expected)[likely] ** 2 / (count * expected[likely])).sum()
    # Chi-square at p = 0.001 for up to 11 degrees of freedom.
    assert (
        statistic < [0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88, 29.59, 31.26][likely.sum() - 1]
    )


@settings(max_examples=200, deadline=None)
@given(
    scores=st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=1, max_size=40),
    row=st.builds(
        Row,
        temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
        top_k=st.integers(0, 45),
        top_p=st.sampled_from([0.05, 0.3, 0.51, 0.77, 0.93, 1.0]),
        min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        seed=st.integers(0, 2**64 - 1),
        position=st.integers(0, 1000),
    ),
)
def test_a_draw_inverts_the_filtered_distribution_in_order_of_ids(scores: list[float], row: Row) -> None:
    expected = probabilities(scores, row)
    (token,) = draw(torch.tensor([scores]), [row])
    uniform = uniforms(*(np.array([x], d) for x, d in ((row.seed, np.uint64), (0, np.int32), (row.position, np.int32))))
    below, upto = expected[:token].sum(), expected[: token + 1].sum()
    assert expected[token] > 0
    assert below - 1e-5 <= uniform[0] <= upto + 1e-5


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_draws_the_same_alone_and_in_any_batch(data: st.DataObject) -> None:
    vocabulary = data.draw(st.sampled_from([3, 70, 257, 1500, 5000]))
    row = st.builds(
        Row,
        temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 5.0]),
        top_k=st.sampled_from([0, 0, 1, 5, 64, 65, 1024, 1025, 4999]),
        top_p=st.sampled_from([0.1, 0.8, 0.999, 1.0]),
        min_p=st.sampled_from([0.0, 0.05]),
        seed=st.integers(0, 2**64 - 1),
        index=st.integers(0, 3),
        position=st.integers(0, 99),
    )
    rows = data.draw(st.lists(row, min_size=2, max_size=9))
    spread = data.draw(st.sampled_from([0.01, 1.0, 4.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits = torch.randn(len(rows), vocabulary, generator=generator) * spread
    if data.draw(st.booleans()):
        logits = (logits * 2).round() / 2  # many ties
    assert draw(logits, rows) == [draw(logits[i : i + 1].clone(), [one])[0] for i, one in enumerate(rows)]


def test_each_of_a_batch_of_unlike_rows_equals_its_solo_run() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(6))
    kinds = [Row(temperature=0), Row(top_k=5, seed=1), Row(seed=2), Row(min_p=0.2, seed=3)]
    for position in range(50):
        rows = [replace(kind, position=position) for kind in kinds]
        assert draw(logits, rows) == [draw(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]


def test_a_wide_vocabulary_is_cut_where_the_definition_cuts_it() -> None:
    scores = torch.randn(3000, generator=torch.Generator().manual_seed(7)).tolist()
    for row in (Row(top_p=0.5), Row(top_p=0.99), Row(top_k=2000), Row(top_k=1500, top_p=0.9), Row(top_k=90)):
        support = set(np.flatnonzero(probabilities(scores, row)))
        found = set(draws(scores, replace(row, temperature=1.0, seed=8), 3000).tolist())
        assert found <= support
        if len(support) < 100:
            assert found == support


@pytest.mark.parametrize(
    "row", [Row(top_p=0.5), Row(top_p=0.9), Row(top_p=0.999), Row(top_k=9000), Row(top_k=1025, top_p=0.95), Row()]
)
def test_a_wide_cut_renormalises_over_exactly_what_it_keeps(row: Row) -> None:
    scores = (torch.randn(20_000, generator=torch.Generator().manual_seed(13)) * 1.5).tolist()
    upto = np.concatenate(([0.0], np.cumsum(probabilities(scores, row))))
    found = draws(scores, replace(row, seed=14), 40)
    numbers = uniforms(np.full(40, 14, np.uint64), np.zeros(40, np.int32), np.arange(40, dtype=np.int32))
    assert np.all((upto[found] - 1e-6 <= numbers) & (numbers <= upto[found + 1] + 1e-6))


@pytest.mark.parametrize("batch", [1, 16])
def test_ties_at_the_top_k_cut_go_to_the_lower_id(batch: int) -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0]).expand(batch, -1)
    found: set[int] = set()
    for i in range(4000 // batch):
        found |= set(draw(logits, [Row(top_k=2, seed=9, index=j, position=i) for j in range(batch)]))
    assert found == {0, 1}


@pytest.mark.parametrize("row", [Row(top_k=3), Row(top_p=0.29), Row(top_k=8, top_p=0.375)])
def test_among_equal_scores_a_cut_keeps_the_lowest_ids(row: Row) -> None:
    assert set(draws([0.0] * 10, replace(row, seed=10), 500).tolist()) == {0, 1, 2}


def test_negative_zero_ties_with_zero() -> None:
    assert set(draws([0.0, -0.0, 0.0], Row(top_k=2), 100).tolist()) == {0, 1}


@pytest.mark.parametrize("vocabulary", [4, 1000])
def test_greedy_takes_the_lowest_of_equal_scores(vocabulary: int) -> None:
    logits = torch.full((3, vocabulary), -1.0)
    logits[0, 1:] = 2.0
    logits[1, vocabulary - 1] = 2.0
    assert draw(logits, [Row(temperature=0)] * 3) == [1, vocabulary - 1, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-10, 1e-30, 1e-38, 1e-40, 1e-45])
@pytest.mark.parametrize("scores", [[1.0, 3.5, 3.0, -2.0], [-3e38, 3e38, 0.0, -INF], [-50.0, -20.0, -20.5, -60.0]])
def test_a_tiny_temperature_draws_the_highest_score(temperature: float, scores: list[float]) -> None:
    row = Row(temperature=temperature, top_p=0.9, min_p=0.1)
    for filtered in (row, replace(row, top_k=2), replace(row, top_p=1.0, min_p=0.0)):
        assert set(draws(scores, filtered, 50).tolist()) == {1}


def test_top_p_applies_to_what_top_k_left() -> None:
    assert set(draws([0.0] * 100, Row(top_k=1, top_p=0.8), 50).tolist()) == {0}
    assert set(draws([0.0] * 100, Row(top_k=4, top_p=0.5), 200).tolist()) == {0, 1}


def test_a_huge_temperature_is_nearly_uniform() -> None:
    assert np.bincount(draws([0.0, 50.0], Row(temperature=1e30), 2000)).min() > 900


def test_minus_infinity_is_never_drawn() -> None:
    scores = [-INF, 0.0, -INF, 0.0, -INF]
    for row in (*FILTERS, Row(temperature=0), Row(top_k=4), Row(temperature=1e30)):
        assert set(draws(scores, row, 300).tolist()) <= {1, 3}


def test_a_token_whose_probability_underflows_is_never_drawn() -> None:
    assert set(draws([-1000.0, 0.0, -1000.0], Row(), 300).tolist()) == {1}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_flagged_and_leave_the_others_alone(temperature: float) -> None:
    nan = float("nan")
    logits = torch.tensor([[1.0, 2.0], [nan, 0.0], [0.0, INF], [-INF, -INF], [-INF, 0.0], [-INF, nan]])
    row = Row(temperature=temperature, top_k=1, top_p=0.9, min_p=0.1)
    found = sample(logits, rows_of([row] * 6))
    assert found.finite.tolist() == [True, False, False, False, True, False]
    assert [found.tokens[i].item() for i in (0, 4)] == [1, 1]
    assert set(found.tokens.tolist()) <= {0, 1}


def test_the_scores_are_not_changed() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(12))
    before = logits.clone()
    sample(logits, rows_of([Row(top_k=3), Row(top_p=0.5, min_p=0.1), Row(temperature=0)]))
    assert torch.equal(logits, before)


def test_tokens_are_int32_and_an_empty_batch_gives_none() -> None:
    assert sample(torch.zeros(1, 4), rows_of([Row()])).tokens.dtype == torch.int32
    empty = sample(torch.zeros(0, 4), rows_of([]))
    assert (empty.tokens.dtype, empty.tokens.numel(), empty.finite.dtype) == (torch.int32, 0, torch.bool)


def test_scores_of_another_type_or_count_are_refused() -> None:
    with pytest.raises(TypeError, match="float32"):
        sample(torch.zeros(1, 4).double(), rows_of([Row()]))
    with pytest.raises(ValueError, match="do not go with 1 rows"):
        sample(torch.zeros(2, 4), rows_of([Row()]))
