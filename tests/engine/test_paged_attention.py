"""Paged attention against its definition in float64; then what each backend promises beyond the definition.

Pools hold NaN in every slot that no sequence owns, and page tables hold nonsense beyond each sequence's last page, so
any test here fails if a backend reads what it should not.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine
from engine import _kernels
from engine.attention import AttentionBackend, PagedLayout, open_attention
from engine.attention.native import NativeAttention
from engine.attention.reference import ReferenceAttention

if TYPE_CHECKING:
    from collections.abc import Sequence

PATHS = _kernels.attention_paths()
DTYPES = (torch.float32, torch.bfloat16)
BACKENDS = [pytest.param(lambda path=path: NativeAttention(2, path), id=path) for path in PATHS]
BACKENDS.append(pytest.param(ReferenceAttention, id="reference"))


@dataclass
class Case:
    """A ragged batch: each sequence's keys, values and queries, and the same laid out in pages.

    ``lengths`` are (context, new tokens) pairs; keys and values are [length, kv_heads, head_dim] for each sequence.
    """

    lengths: Sequence[tuple[int, int]]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    query: torch.Tensor
    kv_heads: int
    page_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        kv_heads, head_dim = self.kv_heads, self.query.shape[-1]
        used = [-(-(context + new) // self.page_size) for context, new in self.lengths]
        order = np.random.default_rng(self.seed).permutation(sum(used) + 2).astype(np.int32)
        shape = (len(order), self.page_size, kv_heads, head_dim)
        self.key_pool = torch.full(shape, torch.nan, dtype=self.query.dtype)
        self.value_pool = torch.full(shape, torch.nan, dtype=self.query.dtype)
        pages = np.full((len(used), max(used, default=0) + 1), np.iinfo(np.int32).min, np.int32)
        for row, count, keys, values in zip(pages, used, self.keys, self.values, strict=True):
            row[:count], order = order[:count], order[count:]
            slots = np.repeat(row[:count].astype(np.int64) * self.page_size, self.page_size)
            slots = torch.from_numpy((slots + np.tile(np.arange(self.page_size), count))[: len(keys)])
            self.key_pool.view(-1, kv_heads, head_dim)[slots] = keys
            self.value_pool.view(-1, kv_heads, head_dim)[slots] = values
        starts = np.concatenate([[0], np.cumsum([new for _, new in self.lengths])]).astype(np.int32)
        self.layout = PagedLayout(starts, np.array([context for context, _ in self.lengths], np.int32), pages)

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1]) ** -0.5

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        out = torch.full_like(self.query, 7.0)
        backend.attend(out, self.query, self.key_pool, self.value_pool, self.layout, self.scale)
        return out

    def expected(self) -> torch.Tensor:
        """Row by row, as the definition says, in float64."""
        rows = [torch.empty(0, *self.query.shape[1:], dtype=torch.float64)]
        queries = iter(self.query.double())
        for (context, new), keys, values in zip(self.lengths, self.keys, self.values, strict=True):
            group = self.query.shape[1] // keys.shape[1]
            for seen in range(context + 1, context + new + 1):
                k = keys[:seen].double().repeat_interleave(group, 1)
                v = values[:seen].double().repeat_interleave(group, 1)
                weights = (self.scale * (k * next(queries)).sum(-1)).softmax(0)
                rows.append((weights[..., None] * v).sum(0)[None])
        return torch.cat(rows)


def make_case(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    query_heads, kv_heads = heads

    def draw(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, head_dim, generator=generator).to(dtype)

    keys = [draw(context + new, kv_heads) for context, new in lengths]
    values = [draw(context + new, kv_heads) for context, new in lengths]
    query = 2 * draw(sum(new for _, new in lengths), query_heads)
    return Case(lengths, keys, values, query, kv_heads, page_size, seed)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    rtol = 2**-8 if actual.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("make_backend", BACKENDS)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 60)), max_size=4),
    group=st.sampled_from([1, 2, 3, 4, 8, 50]),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 24, 64, 80, 128, 256]),
    page_size=st.sampled_from([1, 4, 7, 16, 64]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_any_ragged_batch_agrees_with_the_definition(
    make_backend, lengths, group, kv_heads, head_dim, page_size, dtype, seed
):
    heads = (group * kv_heads, kv_heads)
    case = make_case(lengths, heads=heads, head_dim=head_dim, page_size=page_size, dtype=dtype, seed=seed)
    assert_close(case.run(make_backend()), case.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make_backend", BACKENDS)
@pytest.mark.parametrize("length", [15, 16, 17, 63, 64, 65, 511, 512, 513, 1025])
def test_a_chunk_that_ends_near_a_border_of_pages_blocks_or_splits_agrees(make_backend, length, dtype):
    case = make_case([(length - 3, 3), (length - 1, 1), (0, min(length, 65))], heads=(3, 1), head_dim=16, dtype=dtype)
    assert_close(case.run(make_backend()), case.expected())


@pytest.mark.parametrize("path", PATHS)
def test_a_long_context_shared_by_many_threads_agrees(path):
    case = make_case([(4000, 1), (5, 1)], dtype=torch.bfloat16)
    assert_close(case.run(NativeAttention(8, path)), case.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_a_row_has_the_same_bits_whatever_shares_its_batch_and_however_many_threads_run(path, dtype):
    case = make_case([(3000, 1), (0, 70), (700, 33), (40, 1), (1500, 2)], dtype=dtype)
    one = NativeAttention(1, path)
    together = case.run(one)
    for threads in (2, 3, 16):
        assert torch.equal(case.run(NativeAttention(threads, path)), together)
    for sequence, lengths in enumerate(case.lengths):
        begin, end = case.layout.query_starts[sequence : sequence + 2]
        alone = replace(
            case,
            lengths=[lengths],
            keys=[case.keys[sequence]],
            values=[case.values[sequence]],
            query=case.query[begin:end],
        )
        assert torch.equal(alone.run(one), together[begin:end])
        assert torch.equal(alone.run(NativeAttention(4, path)), together[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_a_row_has_the_same_bits_however_its_prompt_was_cut_into_chunks_and_pages(path, dtype):
    whole = make_case([(0, 700)], heads=(4, 2), dtype=dtype)
    backend = NativeAttention(2, path)
    expected = whole.run(backend)
    for chunk, page_size in ((1, 16), (17, 1), (256, 64), (699, 5)):
        for begin in range(0, 700, chunk):
            if chunk == 1 and begin not in {0, 63, 64, 65, 511, 512, 513, 699}:
                continue
            end = min(begin + chunk, 700)
            part = Case(
                [(begin, end - begin)],
                [whole.keys[0][:end]],
                [whole.values[0][:end]],
                whole.query[begin:end],
                whole.kv_heads,
                page_size,
                seed=chunk,
            )
            assert torch.equal(part.run(backend), expected[begin:end])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["keys", "values", "query"])
@pytest.mark.parametrize("path", PATHS)
def test_a_number_that_is_not_finite_reaches_only_the_rows_that_see_it(path, where, poison):
    case = make_case([(10, 20), (0, 30), (600, 1)], heads=(4, 2), head_dim=24)
    backend = NativeAttention(2, path)
    clean = case.run(backend)
    if where == "query":
        case.query[20 + 13] = poison
        hit = torch.arange(len(clean)) == 20 + 13
    else:
        getattr(case, where)[1][13] = poison
        hit = (torch.arange(len(clean)) >= 20 + 13) & (torch.arange(len(clean)) < 50)
    dirty = replace(case).run(backend)
    assert torch.equal(dirty[~hit], clean[~hit])
    assert not dirty[hit].flatten(1).isfinite().all(1).any()


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_huge_scores_pick_the_greatest_without_overflow(make_backend):
    case = make_case([(599, 1)], heads=(2, 1), head_dim=8)
    case.query.fill_(1e4)
    case.keys[0].fill_(-1e4)
    case.keys[0][100] = 1e4
    assert torch.equal(replace(case).run(make_backend()), case.values[0][100].expand(1, 2, 8))


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_scores_of_minus_infinity_weigh_nothing_even_when_they_come_first(make_backend):
    case = make_case([(1299, 1)], heads=(2, 1), head_dim=8)
    case.query.fill_(1e30)
    case.keys[0].fill_(-1e30)
    case.keys[0][1200] = 0.0
    assert torch.equal(replace(case).run(make_backend()), case.values[0][1200].expand(1, 2, 8))


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("make_backend", BACKENDS)
def test_the_scale_may_be_any_number(make_backend, scale):
    case = make_case([(20, 3)])
    out = torch.empty_like(case.query)
    make_backend().attend(out, case.query, case.key_pool, case.value_pool, case.layout, scale)
    scaled = replace(case, query=case.query * (scale / case.scale))
    assert_close(out, scaled.expected())


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_nothing_new_to_compute_is_fine(make_backend):
    assert make_case([]).run(make_backend()).shape == (0, 9, 64)
    assert make_case([(40, 0), (0, 0)]).run(make_backend()).shape == (0, 9, 64)


def test_thousands_of_sequences_in_one_batch_agree():
    case = make_case([(i % 20, 1) for i in range(3000)], heads=(2, 1), head_dim=8)
    assert_close(case.run(NativeAttention(2)), case.expected())


def test_the_output_may_overwrite_the_query():
    case = make_case([(3000, 1), (0, 100)])
    backend = NativeAttention(4)
    expected = case.run(backend)
    backend.attend(case.query, case.query, case.key_pool, case.value_pool, case.layout, case.scale)
    assert torch.equal(case.query, expected)


def test_calls_from_several_python_threads_do_not_mix():
    backend = NativeAttention(2)
    cases = [make_case([(900, 1), (0, 40 + seed)], seed=seed) for seed in range(4)]
    expected = [case.run(backend) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            for actual, wanted in zip(pool.map(lambda case: case.run(backend), cases), expected, strict=True):
                assert torch.equal(actual, wanted)


TENSOR_FAULTS = {
    "dtype not supported": (TypeError, lambda t: {name: x.double() for name, x in t.items()}),
    "dtypes differ": (TypeError, lambda t: {"key_pool": t["key_pool"].bfloat16()}),
    "out of another dtype": (TypeError, lambda t: {"out": t["out"].bfloat16()}),
    "out of another shape": (ValueError, lambda t: {"out": t["out"][:-1]}),
    "query of two dimensions": (ValueError, lambda t: {"query": t["query"].flatten(1), "out": t["out"].flatten(1)}),
    "pools of different shapes": (ValueError, lambda t: {"value_pool": t["value_pool"][:-1]}),
    "pool of three dimensions": (ValueError, lambda t: {k: t[k].flatten(1, 2) for k in ("key_pool", "value_pool")}),
    "heads that do not divide": (ValueError, lambda t: {k: t[k][:, :7].contiguous() for k in ("query", "out")}),
    "head_dim not the pools'": (ValueError, lambda t: {k: t[k][..., :8].contiguous() for k in ("query", "out")}),
    "head_dim not in eights": (ValueError, lambda t: {k: x[..., :12].contiguous() for k, x in t.items()}),
    "head_dim too large": (ValueError, lambda t: {k: x.repeat(1, *[1] * (x.dim() - 2), 17) for k, x in t.items()}),
    "strided query": (ValueError, lambda t: {"query": t["query"].transpose(0, 1).contiguous().transpose(0, 1)}),
    "strided pool": (ValueError, lambda t: {"key_pool": t["key_pool"].transpose(1, 2).contiguous().transpose(1, 2)}),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
@pytest.mark.parametrize("make_backend", BACKENDS[-2:])
def test_wrong_tensors_are_refused_before_anything_is_written(make_backend, fault):
    case = make_case([(20, 3), (0, 5)], heads=(9, 3), head_dim=16)
    tensors = {
        "out": torch.full_like(case.query, 7.0),
        "query": case.query,
        "key_pool": case.key_pool,
        "value_pool": case.value_pool,
    }
    error, spoil = TENSOR_FAULTS[fault]
    tensors |= spoil(tensors)
    with pytest.raises(error):
        make_backend().attend(*tensors.values(), case.layout, case.scale)
    assert (tensors["out"] == 7.0).all()


LAYOUT_FAULTS = {
    "page beyond the pool": (ValueError, lambda x: {"pages": np.where(x.pages >= 0, x.pages + 100, x.pages)}),
    "negative page": (ValueError, lambda x: {"pages": x.pages - 100}),
    "page table too narrow": (ValueError, lambda x: {"pages": np.ascontiguousarray(x.pages[:, :1])}),
    "page table of another batch": (ValueError, lambda x: {"pages": x.pages[:1]}),
    "negative context": (ValueError, lambda x: {"context_lens": np.array([-1, 5], np.int32)}),
    "context of int64": (TypeError, lambda x: {"context_lens": x.context_lens.astype(np.int64)}),
    "starts of int64": (TypeError, lambda x: {"query_starts": x.query_starts.astype(np.int64)}),
    "pages of uint32": (TypeError, lambda x: {"pages": x.pages.astype(np.uint32)}),
    "starts that end early": (ValueError, lambda x: {"query_starts": np.array([0, 3, 7], np.int32)}),
    "starts that begin late": (ValueError, lambda x: {"query_starts": np.array([1, 3, 8], np.int32)}),
    "starts that descend": (ValueError, lambda x: {"query_starts": np.array([0, 9, 8], np.int32)}),
    "too few starts": (ValueError, lambda x: {"query_starts": np.array([0, 8], np.int32)}),
    "strided pages": (ValueError, lambda x: {"pages": np.asfortranarray(x.pages)}),
    "strided context": (ValueError, lambda x: {"context_lens": np.zeros(4, np.int32)[::2]}),
}


@pytest.mark.parametrize("fault", LAYOUT_FAULTS)
@pytest.mark.parametrize("make_backend", BACKENDS[-2:])
def test_a_wrong_layout_is_refused_before_anything_is_written(make_backend, fault):
    case = make_case([(20, 3), (0, 5)])
    error, spoil = LAYOUT_FAULTS[fault]
    layout = replace(case.layout, **spoil(case.layout))
    out = torch.full_like(case.query, 7.0)
    with pytest.raises(error):
        make_backend().attend(out, case.query, case.key_pool, case.value_pool, layout, case.scale)
    assert (out == 7.0).all()


def test_tensors_of_another_device_are_refused():
    case = make_case([(20, 3)])
    with pytest.raises(TypeError, match="CPU"):
        NativeAttention(1).attend(
            case.query.to("meta"), case.query, case.key_pool, case.value_pool, case.layout, case.scale
        )


@pytest.mark.parametrize(("threads", "path"), [(0, None), (-1, None), (5000, None), (1, "sparc")])
def test_impossible_threads_and_paths_are_refused(threads, path):
    with pytest.raises(ValueError, match=r"threads|sparc"):
        NativeAttention(threads, path)


def test_the_fastest_path_is_taken_unless_told_otherwise():
    backend = open_attention(2)
    assert isinstance(backend, NativeAttention)
    assert (backend.path, backend.threads) == (PATHS[0], 2)
    assert PATHS[-1] == "portable"


def test_without_the_kernel_the_reference_serves_and_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, "engine.attention.native")
    monkeypatch.setitem(sys.modules, "engine._kernels", None)
    monkeypatch.delattr(engine, "_kernels")
    with structlog.testing.capture_logs() as logs:
        backend = open_attention(2)
    assert isinstance(backend, ReferenceAttention)
    assert [entry["event"] for entry in logs] == ["attention_kernel_missing"]
