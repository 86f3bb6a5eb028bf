from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.base import ModelLoadError
from engine.models.registry import architectures, load_model
from engine.weights.gguf import GGUFFile
from tests.engine.model_run import ModelRun, relative_errors
from tests.engine.tiny_llama import (
    HEADS,
    HIDDEN,
    VOCAB,
    TinyFile,
    random_tensors,
    reference_logits,
)

if TYPE_CHECKING:
    from pathlib import Path

IDS = [5, 17, 90, 3, 3, 44, 61, 2, 95, 0, 31]


def load(path: Path, dtype: torch.dtype = torch.float32) -> ModelRun:
    return ModelRun(load_model(GGUFFile(path), dtype), page_size=4)


def logits(path: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    run = load(path, dtype)
    return run.run(run.begin(IDS))


def refusal(file: TinyFile, path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(file.write(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("head", [False, True], ids=["tied", "head of its own"])
def test_the_scores_are_those_of_transformers(tmp_path: Path, head: bool) -> None:
    tensors = random_tensors(head=head)
    found = logits(TinyFile(tensors).write(tmp_path / "m.gguf"))
    assert relative_errors(found, reference_logits(tensors, IDS)).max() < 1e-5


def test_bfloat16_scores_are_close_to_those_of_transformers(tmp_path: Path) -> None:
    tensors = random_tensors(head=True)
    found = logits(TinyFile(tensors).write(tmp_path / "m.gguf"), torch.bfloat16)
    assert relative_errors(found, reference_logits(tensors, IDS)).max() < 2e-2


def test_a_head_that_repeats_the_embedding_gives_the_scores_of_a_tied_one(tmp_path: Path) -> None:
    tied = random_tensors()
    repeated = {**tied, "output.weight": tied["token_embd.weight"]}
    found = logits(TinyFile(repeated).write(tmp_path / "repeated.gguf"))
    assert relative_errors(found, reference_logits(tied, IDS)).max() < 1e-5
    assert torch.equal(found, logits(TinyFile(tied).write(tmp_path / "tied.gguf")))


def test_a_head_in_the_file_is_used_and_not_the_embedding(tmp_path: Path) -> None:
    with_head = random_tensors(head=True)
    without = {name: tensor for name, tensor in with_head.items() if name != "output.weight"}
    found = logits(TinyFile(with_head).write(tmp_path / "head.gguf"))
    assert relative_errors(found, reference_logits(without, IDS)).min() > 0.1


@pytest.mark.parametrize("name", sorted(random_tensors(head=False)))
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = random_tensors()
    del tensors[name]
    assert f"tensor {name} is missing" in refusal(TinyFile(tensors), tmp_path / "m.gguf")


@pytest.mark.parametrize("name", sorted(random_tensors(head=True)))
def test_a_misshapen_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(head=True)
    tensors[name] = np.concatenate((tensors[name], tensors[name]))
    assert f"tensor {name} has shape" in refusal(TinyFile(tensors), tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.2.attn_norm.weight", "cls.weight"])
def test_a_tensor_that_the_architecture_does_not_use_is_refused(tmp_path: Path, name: str) -> None:
    tensors = {**random_tensors(), name: np.zeros(HIDDEN, np.float32)}
    assert name in refusal(TinyFile(tensors), tmp_path / "m.gguf")


def test_of_many_unused_tensors_three_are_named(tmp_path: Path) -> None:
    tensors = random_tensors() | {f"extra.{i}": np.zeros(4, np.float32) for i in range(5)}
    assert refusal(TinyFile(tensors), tmp_path / "m.gguf").endswith("extra.0, extra.1, extra.2 and 2 more")


@pytest.mark.parametrize("scaling", ["linear", "yarn", "longrope", "what"])
def test_a_rope_scaling_type_that_is_not_supported_is_refused(tmp_path: Path, scaling: str) -> None:
    file = TinyFile(metadata={"llama.rope.scaling.type": scaling, "llama.rope.scaling.factor": 4.0})
    assert f"rope scaling type '{scaling}'" in refusal(file, tmp_path / "m.gguf")


@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "llama.rope.scale_linear"])
def test_a_rope_scaling_factor_without_a_type_is_refused_as_linear(tmp_path: Path, key: str) -> None:
    assert "'linear'" in refusal(TinyFile(metadata={key: 2.0}), tmp_path / "m.gguf")


def test_rope_scaling_of_type_none_changes_nothing(tmp_path: Path) -> None:
    tensors = random_tensors()
    file = TinyFile(tensors, {"llama.rope.scaling.type": "none", "llama.rope.dimension_count": 8})
    assert relative_errors(logits(file.write(tmp_path / "m.gguf")), reference_logits(tensors, IDS)).max() < 1e-5


def test_rope_frequency_factors_are_refused(tmp_path: Path) -> None:
    tensors = {**random_tensors(), "rope_freqs.weight": np.ones(4, np.float32)}
    assert "rope_freqs.weight" in refusal(TinyFile(tensors), tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.attention.causal": False}, "llama.attention.causal"),
        ({"llama.attention.head_count_kv": 3}, "sizes"),
        ({"llama.attention.head_count": 0}, "0 heads"),
        ({"llama.block_count": 0}, "sizes"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "key llama.attention.layer_norm_rms_epsilon is missing"),
        ({"llama.context_length": "long"}, "key llama.context_length is of type STRING, not int"),
    ],
)
def test_metadata_that_cannot_be_served_is_named(tmp_path: Path, metadata: dict[str, object], named: str) -> None:
    assert named in refusal(TinyFile(metadata=metadata), tmp_path / "m.gguf")


def test_an_unknown_architecture_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    message = refusal(TinyFile(architecture="mamba9"), tmp_path / "m.gguf")
    assert "'mamba9'" in message
    assert all(name in message for name in architectures())


def test_without_a_vocabulary_size_the_tokens_are_counted(tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(VOCAB)]
    file = TinyFile(metadata={"llama.vocab_size": None, "tokenizer.ggml.tokens": tokens})
    assert load(file.write(tmp_path / "m.gguf")).model.shape.vocab_size == VOCAB


def test_as_many_kv_heads_as_heads_where_the_file_names_none(tmp_path: Path) -> None:
    file = TinyFile(metadata={"llama.attention.head_count_kv": None})
    assert f"tensor blk.0.attn_k.weight has shape [16, {HIDDEN}], not [{HEADS * 8}" in refusal(
        file, tmp_path / "m.gguf"
    )
