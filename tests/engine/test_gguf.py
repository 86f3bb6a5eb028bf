from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from engine.base import ModelLoadError
from engine.weights.gguf import GGUFFile
from tests.engine.tiny_llama import TinyFile, random_tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt


def write_tensor(path: Path, data: npt.NDArray[Any], kind: Type) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0], ids=lambda kind: kind.name)
def test_quantized_blocks_come_back_near_what_was_written(tmp_path: Path, kind: Type) -> None:
    values = np.random.default_rng(1).normal(size=(6, 64)).astype(np.float32)
    packed = quantize(values, kind)
    found = write_tensor(tmp_path / "m.gguf", packed, kind).tensor("t", (6, 64))
    assert torch.equal(found, torch.from_numpy(dequantize(packed, kind)))
    steps = {Type.Q4_0: 15, Type.Q4_1: 15, Type.Q5_0: 31, Type.Q5_1: 31, Type.Q8_0: 254}[kind]
    spread = np.abs(values.reshape(6, 2, 32)).max(axis=2, keepdims=True).repeat(32, axis=2).reshape(6, 64)
    assert np.all(np.abs(found.numpy() - values) <= 2.1 * spread / steps)


@pytest.mark.parametrize(("kind", "dtype"), [(Type.F32, np.float32), (Type.F16, np.float16)])
def test_plain_floats_come_back_exactly(tmp_path: Path, kind: Type, dtype: type) -> None:
    values = np.random.default_rng(2).normal(size=(3, 5)).astype(dtype)
    found = write_tensor(tmp_path / "m.gguf", values, kind).tensor("t", (3, 5))
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), values.astype(np.float32))


def test_bfloat16_comes_back_exactly(tmp_path: Path) -> None:
    values = torch.randn(3, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    file = write_tensor(tmp_path / "m.gguf", values.view(torch.uint8).numpy(), Type.BF16)
    assert torch.equal(file.tensor("t", (3, 32), torch.bfloat16), values)
    assert torch.equal(file.tensor("t", (3, 32)), values.float())


def _scales_and_mins(packed: bytes) -> list[tuple[int, int]]:
    """The 6-bit scales and minimums of eight sub-blocks, from the 12 bytes that Q4_K and Q5_K keep them in."""
    found = []
    for j in range(8):
        if j < 4:
            found.append((packed[j] & 63, packed[j + 4] & 63))
        else:
            low, high = packed[j + 4], (packed[j - 4] >> 6, packed[j] >> 6)
            found.append(((low & 15) | high[0] << 4, (low >> 4) | high[1] << 4))
    return found


def _half(data: bytes) -> float:
    return float(np.frombuffer(data, np.float16)[0])


def _q4_k(block: bytes) -> list[float]:
    d, least, scales, quants = _half(block[:2]), _half(block[2:4]), _scales_and_mins(block[4:16]), block[16:]
    out = []
    for i in range(256):
        sub, at = divmod(i, 32)
        nibble = quants[sub // 2 * 32 + at] >> (4 * (sub % 2)) & 15
        out.append(d * scales[sub][0] * nibble - least * scales[sub][1])
    return out


def _q5_k(block: bytes) -> list[float]:
    d, least, scales = _half(block[:2]), _half(block[2:4]), _scales_and_mins(block[4:16])
    high, quants = block[16:48], block[48:]
    out = []
    for i in range(256):
        sub, at = divmod(i, 32)
        value = (quants[sub // 2 * 32 + at] >> (4 * (sub % 2)) & 15) | (high[at] >> sub & 1) << 4
        out.append(d * scales[sub][0] * value - least * scales[sub][1])
    return out


def _q6_k(block: bytes) -> list[float]:
    low, high, scales, d = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8), _half(block[208:])
    out = []
    for i in range(256):
        half, at = divmod(i, 128)
        quarter, lane = divmod(at, 32)
        nibble = low[half * 64 + (quarter % 2) * 32 + lane] >> (4 * (quarter // 2)) & 15
        value = (nibble | (high[half * 32 + lane] >> (2 * quarter) & 3) << 4) - 32
        out.append(d * int(scales[i // 16]) * value)
    return out


@pytest.mark.parametrize(
    ("kind", "size", "halves", "decode"),
    [(Type.Q4_K, 144, (0, 2), _q4_k), (Type.Q5_K, 176, (0, 2), _q5_k), (Type.Q6_K, 210, (208,), _q6_k)],
    ids=["Q4_K", "Q5_K", "Q6_K"],
)
def test_super_blocks_come_back_as_their_format_says(
    tmp_path: Path, kind: Type, size: int, halves: tuple[int, ...], decode: Callable[[bytes], list[float]]
) -> None:
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (2, 3, size), dtype=np.uint8)
    for at in halves:
        blocks[..., at : at + 2] = rng.uniform(0.01, 0.1, (2, 3, 1)).astype(np.float16).view(np.uint8)
    found = write_tensor(tmp_path / "m.gguf", blocks.reshape(2, 3 * size), kind).tensor("t", (2, 768))
    expected = np.array([[x for block in row for x in decode(block.tobytes())] for row in blocks])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_type_that_is_not_supported_is_named(tmp_path: Path) -> None:
    file = write_tensor(tmp_path / "m.gguf", np.zeros((2, 4), np.int8), Type.I8)
    with pytest.raises(ModelLoadError, match="tensor t is of type I8"):
        file.tensor("t", (2, 4))


def test_a_tensor_is_a_copy_that_outlives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    found = write_tensor(path, np.ones((2, 4), np.float32), Type.F32).tensor("t", (2, 4))
    path.write_bytes(bytes(path.stat().st_size))
    found += 1
    assert torch.equal(found, torch.full((2, 4), 2.0))


def test_metadata_is_read_by_type(tmp_path: Path) -> None:
    extra = {"s": "text", "i": 7, "f": 0.5, "b": True, "ss": ["a", "ü"], "is": [1, 2], "fs": [0.5, 1.5]}
    file = GGUFFile(TinyFile(metadata=extra).write(tmp_path / "m.gguf"))
    assert file.architecture == "llama"
    assert (file.string("s"), file.integer("i"), file.number("f"), file.boolean("b")) == ("text", 7, 0.5, True)
    assert (file.strings("ss"), file.integers("is"), file.numbers("fs")) == (["a", "ü"], [1, 2], [0.5, 1.5])
    assert file.number("i") == 7.0
    assert file.has("s")
    assert not file.has("other")


def test_a_missing_key_is_an_error_unless_it_has_a_default(tmp_path: Path) -> None:
    file = GGUFFile(TinyFile().write(tmp_path / "m.gguf"))
    assert (file.string("k", "d"), file.integer("k", 0), file.boolean("k", False)) == ("d", 0, False)
    for read in (file.string, file.integer, file.number, file.boolean, file.strings, file.integers, file.numbers):
        with pytest.raises(ModelLoadError, match="key k is missing"):
            read("k")


@pytest.mark.parametrize("read", ["string", "integer", "number", "boolean", "integers", "numbers"])
def test_a_key_of_another_type_is_an_error_that_names_both(tmp_path: Path, read: str) -> None:
    file = GGUFFile(TinyFile(metadata={"k": ["a"]}).write(tmp_path / "m.gguf"))
    with pytest.raises(ModelLoadError, match="key k is of type ARRAY"):
        getattr(file, read)("k")


def test_text_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    path = TinyFile(metadata={"k": "abcdefgh"}).write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"abcdefgh", b"abcd\xff\xff\xff\xff"))
    with pytest.raises(ModelLoadError, match="key k cannot be read"):
        GGUFFile(path).string("k")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"absent\.gguf: cannot be read: No such file"):
        GGUFFile(tmp_path / "absent.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip", b"\x00" * 64])
def test_a_file_of_another_kind_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        GGUFFile(path)


def test_a_file_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in random_tensors().items() if not name.startswith("blk.1")}
    whole = TinyFile(tensors).write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    # Every length of the header, then some of the data: its last bytes are part of the last tensor.
    for length in (*range(4, 1500), *range(1500, len(whole), 997), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match="is truncated or damaged"):
            GGUFFile(path)


def test_a_count_far_beyond_the_file_is_an_error_at_once(tmp_path: Path) -> None:
    path = TinyFile(metadata={"k": list(range(8))}).write(tmp_path / "m.gguf")
    data = path.read_bytes()
    at = data.index(b"k" + (9).to_bytes(4, "little")) + 9
    path.write_bytes(data[:at] + (2**60).to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(ModelLoadError, match="is truncated or damaged"):
        GGUFFile(path)
