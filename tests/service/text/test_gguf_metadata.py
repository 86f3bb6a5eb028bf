from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.text import TokenizerLoadError
from service.text.gguf_metadata import read_metadata

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_every_value_of_the_default_model_equals_what_the_format_s_own_reader_finds(smollm_path: Path) -> None:
    metadata = read_metadata(smollm_path)
    fields = {k: v for k, v in gguf.GGUFReader(smollm_path).fields.items() if not k.startswith("GGUF.")}
    assert list(metadata.keys()) == list(fields)
    for key, field in fields.items():
        assert metadata.value(key) == field.contents()


def test_each_scalar_type_and_array_type_is_read(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_int32("i32", -5)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("bools", [True, False])
    writer.add_array("strings", ["", "é"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_metadata(path)
    assert [metadata.integer(key) for key in ("u8", "i8", "u16", "i16", "i32", "u64", "i64")] == [
        *(200, -3, 60000, -30000, -5, 2**63, -(2**62))
    ]
    assert (metadata.value("f32"), metadata.value("f64"), metadata.boolean("yes")) == (0.5, 0.1, True)
    assert (metadata.value("floats"), metadata.value("bools")) == ([0.5, 1.5], [True, False])
    assert metadata.strings("strings") == ["", "é"]
    assert metadata.string("absent") is None


def test_a_value_of_another_type_is_an_error_that_names_the_key(write_gguf: Callable[..., Path]) -> None:
    metadata = read_metadata(write_gguf())
    for getter, key in (
        (metadata.string, "bos_token_id"),
        (metadata.integer, "add_bos_token"),
        (metadata.boolean, "bos_token_id"),
        (metadata.strings, "token_type"),
        (metadata.integers, "tokens"),
    ):
        with pytest.raises(TokenizerLoadError, match=f"tokenizer.ggml.{key} is not"):
            getter(f"tokenizer.ggml.{key}")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(data=st.data())
def test_a_cut_file_is_an_error_wherever_it_is_cut(write_gguf: Callable[..., Path], data: st.DataObject) -> None:
    path = write_gguf()
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(TokenizerLoadError, match="not a readable GGUF file"):
        read_metadata(path)


def _replaced(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:offset] + value + whole[offset + len(value) :]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_replaced(0, b"GGML"), "magic"),
        (_replaced(4, (1).to_bytes(4, "little")), "version 1"),
        (_replaced(4, (3).to_bytes(4, "big")), "big-endian"),
        (_replaced(24, (2**64 - 1).to_bytes(8, "little")), "ends inside a string"),
        (lambda whole: whole.replace(b"tokenizer.ggml.model", b"general.architecture"), "appears twice"),
        (lambda whole: whole.replace(b"llama", b"\xff\xff\xff\xff\xff"), "utf-8"),
    ],
)
def test_a_broken_file_is_an_error_of_one_line(
    write_gguf: Callable[..., Path], spoil: Callable[[bytes], bytes], message: str
) -> None:
    path = write_gguf()
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(TokenizerLoadError, match=message) as caught:
        read_metadata(path)
    assert "\n" not in str(caught.value)


def test_an_array_longer_than_the_file_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    def number(value: int, size: int) -> bytes:
        return value.to_bytes(size, "little")

    for item_type in (4, 8):
        head = b"GGUF" + number(3, 4) + number(0, 8) + number(1, 8) + number(1, 8) + b"k"
        (tmp_path / "huge.gguf").write_bytes(head + number(9, 4) + number(item_type, 4) + number(2**40, 8))
        with pytest.raises(TokenizerLoadError, match="ends inside an array"):
            read_metadata(tmp_path / "huge.gguf")


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match=r"nowhere\.gguf"):
        read_metadata(tmp_path / "nowhere.gguf")


def test_an_array_of_arrays_is_refused(tmp_path: Path) -> None:
    writer: Any = gguf.GGUFWriter(tmp_path / "nested.gguf", "llama")
    writer.add_array("nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(TokenizerLoadError, match="type 9"):
        read_metadata(tmp_path / "nested.gguf")
