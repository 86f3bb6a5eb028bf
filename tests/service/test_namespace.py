from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.namespace import Namespace
from service.replica import build_replica, file_generation
from service.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

PARTS = st.text(max_size=6) | st.text(alphabet="\x00\x01a", max_size=9)
NAMESPACES = st.builds(Namespace, PARTS, PARTS, PARTS)


@given(NAMESPACES, NAMESPACES)
def test_no_two_namespaces_are_spelled_the_same(one: Namespace, other: Namespace) -> None:
    assert (one.encode() == other.encode()) is (one == other)


@given(NAMESPACES)
def test_a_namespace_is_read_back_from_its_bytes(namespace: Namespace) -> None:
    assert Namespace.decode(namespace.encode()) == namespace


@given(NAMESPACES, st.binary(min_size=1, max_size=9))
def test_the_parts_of_one_namespace_never_run_into_the_next(namespace: Namespace, more: bytes) -> None:
    with pytest.raises(ValueError, match="is no namespace"):
        Namespace.decode(namespace.encode() + more)


def generation(file: Path, script: dict[str, object]) -> str:
    file.write_text(json.dumps(script))
    replica = build_replica(Settings(engine=f"scripted:{file}", pool_tokens=64))
    replica.engine.close()
    assert replica.model.limits.generation == replica.model.generation
    return replica.model.generation


def test_a_script_of_other_content_under_the_same_name_is_another_generation(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    first = generation(file, {"name": "same"})
    assert generation(file, {"name": "same"}) == first
    assert generation(file, {"name": "same", "token_us": 0}) != first


def test_a_model_file_that_was_replaced_under_its_name_is_another_generation(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    os.utime(file, ns=(1, 1))
    first = file_generation(file)
    os.utime(file, ns=(5, 1))
    assert file_generation(file) == first
    os.utime(file, ns=(1, 2))
    changed = file_generation(file)
    file.write_bytes(b"more weights")
    os.utime(file, ns=(1, 1))
    assert len({first, changed, file_generation(file)}) == 3
