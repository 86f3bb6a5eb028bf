from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.base import FUTURE_TOKEN, Batch, Engine, EngineError, ModelLoadError, SamplingRows
from engine.torch_engine import DEFAULT_POOL_TOKENS, TorchEngine
from tests.engine.tiny_llama import CONTEXT, HEAD_DIM, HEADS, VOCAB, TinyFile, random_tensors, reference_logits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = [5, 17, 90, 3, 3, 44, 61]


@dataclass
class Part:
    """One sequence's share of a batch."""

    row: int
    ids: list[int]
    done: int
    pages: list[int]
    sampled: bool = True
    temperature: float = 0.0
    seed: int = 0
    position: int = 0


def batch_of(parts: list[Part], step: int = 1) -> Batch:
    width = max((len(part.pages) for part in parts), default=0)
    drawing = [part for part in parts if part.sampled]
    batch = Batch(
        step=step,
        request_ids=tuple(f"r{part.row}" for part in parts),
        rows=np.array([part.row for part in parts], np.int32),
        token_ids=np.array([i for part in parts for i in part.ids], np.int32),
        query_lens=np.array([len(part.ids) for part in parts], np.int32),
        context_lens=np.array([part.done for part in parts], np.int32),
        pages=np.array([part.pages + [-7] * (width - len(part.pages)) for part in parts], np.int32).reshape(-1, width),
        sampled=np.array([i for i, part in enumerate(parts) if part.sampled], np.int32),
        sampling=SamplingRows(
            temperature=np.array([part.temperature for part in drawing], np.float32),
            top_k=np.zeros(len(drawing), np.int32),
            top_p=np.ones(len(drawing), np.float32),
            min_p=np.zeros(len(drawing), np.float32),
            seed=np.array([part.seed for part in drawing], np.uint64),
            index=np.zeros(len(drawing), np.int32),
            position=np.array([part.position for part in drawing], np.int32),
        ),
    )
    # A write to a snapshot of the scheduler's is an error here.
    for owner in (batch, batch.sampling):
        for field in fields(owner):
            if isinstance(value := getattr(owner, field.name), np.ndarray):
                value.flags.writeable = False
    return batch


def tokens(engine: Engine, *parts: Part) -> list[int]:
    engine.forward(batch_of(list(parts)))
    return engine.sample().result(30).tokens.tolist()


def greedy(tensors: dict[str, np.ndarray], ids: list[int], count: int) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        ids.append(int(reference_logits(tensors, ids)[-1].argmax()))
    return ids[-count:]


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return random_tensors(seed=1, head=True)


@pytest.fixture(scope="module")
def model(tensors: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    poisoned = {name: tensor.copy() for name, tensor in tensors.items()}
    poisoned["token_embd.weight"][VOCAB - 1] = np.nan
    return TinyFile(poisoned).write(tmp_path_factory.mktemp("model") / "Tiny.F32.gguf")


@pytest.fixture
def engine(model: Path) -> Iterator[TorchEngine]:
    engine = TorchEngine(model, dtype="float32", page_size=4, pool_tokens=96, max_rows=4, threads=2)
    yield engine
    engine.close()


def test_it_says_what_it_serves(engine: TorchEngine) -> None:
    spec = engine.spec
    assert (spec.name, spec.architecture, spec.vocab_size, spec.context_length) == ("Tiny", "llama", VOCAB, CONTEXT)
    assert (spec.device, spec.dtype) == ("cpu", "float32")
    assert (engine.page_size, engine.num_pages, engine.max_rows) == (4, 24, 4)


def test_steps_launched_before_any_is_read_decode_greedily(engine: TorchEngine, tensors: dict[str, np.ndarray]) -> None:
    pages = [9, 2, 17, 5]
    futures = []
    engine.forward(batch_of([Part(3, PROMPT, 0, pages)]))
    futures.append(engine.sample())
    for i in range(8):
        engine.forward(batch_of([Part(3, [FUTURE_TOKEN], len(PROMPT) + i, pages)], step=2 + i))
        futures.append(engine.sample())
    assert [future.result(30).tokens.tolist() for future in futures] == [[t] for t in greedy(tensors, PROMPT, 9)]


def test_chunks_and_decodes_share_a_step(engine: TorchEngine, tensors: dict[str, np.ndarray]) -> None:
    other = [8, 9, 10]
    first = tokens(engine, Part(0, PROMPT, 0, [0, 1, 2]))
    engine.forward(batch_of([Part(1, other[:2], 0, [5], sampled=False), Part(0, [FUTURE_TOKEN], 7, [0, 1, 2])]))
    result = engine.sample().result(30)
    assert first + result.tokens.tolist() == greedy(tensors, PROMPT, 2)
    assert result.finite.tolist() == [True, True]
    last = tokens(engine, Part(0, [FUTURE_TOKEN], 8, [0, 1, 2]), Part(1, other[2:], 2, [5]))
    assert last == [greedy(tensors, PROMPT, 3)[-1], *greedy(tensors, other, 1)]


def test_a_step_in_which_nobody_samples_gives_no_tokens(engine: TorchEngine) -> None:
    engine.forward(batch_of([Part(0, PROMPT, 0, [0, 1], sampled=False)]))
    result = engine.sample().result(30)
    assert (result.tokens.dtype, result.tokens.shape) == (np.int32, (0,))
    assert result.finite.tolist() == [True]


def test_cached_pages_of_another_sequence_are_read_through_the_page_table(
    engine: TorchEngine, tensors: dict[str, np.ndarray]
) -> None:
    tokens(engine, Part(0, PROMPT, 0, [3, 11]))
    assert tokens(engine, Part(1, PROMPT[4:], 4, [3, 12])) == greedy(tensors, PROMPT, 1)


def test_a_seed_draws_the_same_alone_and_beside_others(engine: TorchEngine) -> None:
    seeded = [Part(0, PROMPT, 0, [0, 1], temperature=1.5, seed=42, position=i) for i in range(20)]
    alone = [tokens(engine, part)[0] for part in seeded]
    beside = [
        tokens(engine, Part(1, [4, 4], 0, [7], temperature=0.7, seed=i), part, Part(2, [9], 0, [8]))[1]
        for i, part in enumerate(seeded)
    ]
    assert alone == beside
    assert len(set(alone)) > 3


def test_numbers_that_are_not_finite_are_the_sequences_own(engine: TorchEngine, tensors: dict[str, np.ndarray]) -> None:
    nan = VOCAB - 1
    parts = [
        Part(0, [1, nan, 2], 0, [0]),
        Part(1, PROMPT, 0, [1, 2]),
        Part(2, [nan, 2, 3], 0, [3], sampled=False),
        Part(3, [4], 0, [4], sampled=False),
    ]
    engine.forward(batch_of(parts))
    result = engine.sample().result(30)
    assert result.finite.tolist() == [False, True, False, True]
    assert result.tokens[1] == greedy(tensors, PROMPT, 1)[0]
    assert 0 <= result.tokens[0] < VOCAB


def test_pages_that_held_numbers_that_were_not_finite_serve_again(
    engine: TorchEngine, tensors: dict[str, np.ndarray]
) -> None:
    tokens(engine, Part(0, [VOCAB - 1] * 8, 0, [0, 1]))
    engine.forward(batch_of([Part(0, PROMPT, 0, [0, 1])]))
    result = engine.sample().result(30)
    assert (result.tokens.tolist(), result.finite.tolist()) == (greedy(tensors, PROMPT, 1), [True])


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (Part(0, [1], 0, [25]), "page is not one of the pool's 24"),
        (Part(0, [1], 0, [-1]), "page is not one"),
        (Part(0, [1], 4, [0]), "page table is too short"),
        (Part(0, [1], CONTEXT, [0] * 40), "longer than the context of 128"),
        (Part(0, [VOCAB], 0, [0]), "not in the vocabulary"),
        (Part(0, [-2], 0, [0]), "not in the vocabulary"),
        (Part(5, [1], 0, [0]), "future-token table"),
        (Part(0, [], 0, [0]), "query_lens"),
    ],
)
def test_a_step_that_cannot_run_fails_alone(
    engine: TorchEngine, tensors: dict[str, np.ndarray], part: Part, reason: str
) -> None:
    engine.forward(batch_of([part], step=7))
    failed = engine.sample()
    engine.forward(batch_of([Part(1, PROMPT, 0, [1, 2])], step=8))
    after = engine.sample()
    with pytest.raises(EngineError, match=f"step 7 failed: .*{reason}") as caught:
        failed.result(30)
    assert not caught.value.sticky
    assert after.result(30).tokens.tolist() == greedy(tensors, PROMPT, 1)


def test_sampling_without_a_forward_is_an_error(engine: TorchEngine) -> None:
    with pytest.raises(EngineError, match="without a forward"):
        engine.sample()
    tokens(engine, Part(0, PROMPT, 0, [0, 1]))
    with pytest.raises(EngineError, match="without a forward"):
        engine.sample()


def test_after_closing_a_step_resolves_to_a_sticky_error(engine: TorchEngine) -> None:
    engine.close()
    engine.close()
    engine.forward(batch_of([Part(0, PROMPT, 0, [0, 1])]))
    with pytest.raises(EngineError) as caught:
        engine.sample().result(0)
    assert caught.value.sticky


def test_its_number_of_threads_is_not_the_callers(model: Path) -> None:
    before = torch.get_num_threads()
    engine = TorchEngine(model, pool_tokens=64, threads=1)
    assert tokens(engine, Part(0, PROMPT, 0, [0]))
    engine.close()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_type_is_the_one_asked_for(model: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    engine = TorchEngine(model, dtype=dtype, pool_tokens=64)
    assert engine.spec.dtype == dtype
    assert tokens(engine, Part(0, PROMPT, 0, [0])) == greedy(tensors, PROMPT, 1)
    engine.close()


def test_a_name_and_a_shorter_context_can_be_given(model: Path) -> None:
    engine = TorchEngine(model, name="mine", context=32, pool_tokens=64)
    assert (engine.spec.name, engine.spec.context_length) == ("mine", 32)
    engine.close()


def test_the_pool_has_a_default_size(model: Path) -> None:
    engine = TorchEngine(model)
    assert engine.num_pages == DEFAULT_POOL_TOKENS // 16
    engine.close()


@pytest.mark.parametrize("context", [0, CONTEXT + 1])
def test_a_context_that_the_model_does_not_have_is_refused(model: Path, context: int) -> None:
    with pytest.raises(ModelLoadError, match=f"context of {CONTEXT} tokens; {context} cannot be served"):
        TorchEngine(model, context=context)


@pytest.mark.parametrize(
    "arguments", [{"dtype": "int8"}, {"page_size": 0}, {"max_rows": 0}, {"threads": 0}, {"pool_tokens": 15}]
)
def test_an_argument_out_of_range_is_refused(model: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="|".join(arguments) if "pool_tokens" not in arguments else "15 tokens"):
        TorchEngine(model, **arguments)


def test_heads_that_attention_cannot_read_are_refused_at_the_start(tmp_path: Path) -> None:
    tensors = random_tensors()
    for name, tensor in tensors.items():
        if name.split(".")[-2] in ("attn_q", "attn_k", "attn_v"):
            tensors[name] = tensor[: len(tensor) * 6 // HEAD_DIM]
        elif "attn_output" in name:
            tensors[name] = tensor[:, : HEADS * 6]
    sizes = {"llama.attention.key_length": 6, "llama.attention.value_length": 6}
    with pytest.raises(ModelLoadError, match="heads of width 6"):
        TorchEngine(TinyFile(tensors, sizes).write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(("asked", "used"), [(None, 0.5), (0.25, 0.25)])
def test_the_default_temperature_is_what_was_asked_for_or_what_the_file_says(
    asked: float | None, used: float, tmp_path: Path
) -> None:
    path = TinyFile(metadata={"general.sampling.temp": 0.5}).write(tmp_path / "warm.gguf")
    engine = TorchEngine(path, temperature=asked, pool_tokens=64, threads=1)
    assert engine.spec.default_temperature == used
    engine.close()
