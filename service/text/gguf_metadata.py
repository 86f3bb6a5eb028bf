"""Reads the key-value section of a GGUF file, and nothing after it.

The `gguf` package's reader makes several numpy views for every string of every array, which takes seconds for a
vocabulary of usual size. This one walks the section once over a memory map and turns each value straight into a Python
object. Every length is checked against the file's size before it is used, so a cut or hostile file gives one clear
error instead of a crash or a huge allocation.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

from service.text.errors import TokenizerLoadError

if TYPE_CHECKING:
    from collections.abc import KeysView, Mapping
    from pathlib import Path

Scalar = str | int | float | bool
Value = Scalar | list[str] | list[int] | list[float] | list[bool]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_TYPE = struct.Struct("<I")


class Metadata:
    """A GGUF file's metadata with typed access. An absent key is None; a value of another type is an error.

    Raises:
        TokenizerLoadError: By every getter, if the key's value is not of the type asked for.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def keys(self) -> KeysView[str]:
        """Every key, in the file's order."""
        return self._values.keys()

    def value(self, key: str) -> Value | None:
        """The value as it is in the file."""
        return self._values.get(key)

    def string(self, key: str) -> str | None:
        """The value of a string key."""
        value = self._values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise TokenizerLoadError(f"{key} is not a string")

    def integer(self, key: str) -> int | None:
        """The value of an integer key."""
        value = self._values.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise TokenizerLoadError(f"{key} is not an integer")

    def boolean(self, key: str) -> bool | None:
        """The value of a boolean key."""
        value = self._values.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise TokenizerLoadError(f"{key} is not a boolean")

    def strings(self, key: str) -> list[str] | None:
        """The value of a string array key."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value  # type: ignore[return-value]
        raise TokenizerLoadError(f"{key} is not an array of strings")

    def integers(self, key: str) -> list[int] | None:
        """The value of an integer array key."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, list) and all(type(item) is int for item in value):
            return value  # type: ignore[return-value]
        raise TokenizerLoadError(f"{key} is not an array of integers")


def read_metadata(path: Path) -> Metadata:
    """Reads a GGUF file's metadata.

    Raises:
        TokenizerLoadError: The file cannot be read, is no GGUF file, is cut, or breaks the format.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return Metadata(_Cursor(view).read_file())
    except OSError as error:
        raise TokenizerLoadError(f"{path}: {error.strerror or error}") from error
    except (TokenizerLoadError, struct.error, ValueError) as error:
        # An empty file cannot be mapped and a cut one cannot be unpacked; both are broken files to the caller.
        raise TokenizerLoadError(f"{path}: not a readable GGUF file: {error}") from error


class _Cursor:
    """A position in the mapped file."""

    __slots__ = ("_offset", "_view")

    def __init__(self, view: mmap.mmap) -> None:
        self._view = view
        self._offset = 0

    def read_file(self) -> dict[str, Value]:
        if self._view[:4] != _MAGIC:
            raise TokenizerLoadError("it does not begin with the GGUF magic")
        self._offset = 4
        version = self._unpack(_TYPE)
        if version not in _VERSIONS:
            raise TokenizerLoadError(f"version {version} is not supported (or the file is big-endian)")
        self._unpack(_LENGTH)  # the number of tensors
        values: dict[str, Value] = {}
        for _ in range(self._unpack(_LENGTH)):
            key = self._read_strings(1)[0]
            if key in values:
                raise TokenizerLoadError(f"the key {key} appears twice")
            values[key] = self._read_value(self._unpack(_TYPE))
        return values

    def _unpack(self, layout: struct.Struct) -> int:
        value: int = layout.unpack_from(self._view, self._offset)[0]
        self._offset += layout.size
        return value

    def _read_value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._read_strings(1)[0]
        if kind == _ARRAY:
            item_kind, count = self._unpack(_TYPE), self._unpack(_LENGTH)
            return self._read_strings(count) if item_kind == _STRING else self._read_scalars(item_kind, count)
        return self._read_scalars(kind, 1)[0]

    def _read_scalars(self, kind: int, count: int) -> list[int] | list[float] | list[bool]:
        if kind not in _SCALAR_FORMATS:
            raise TokenizerLoadError(f"values of type {kind} are not supported")
        size = struct.calcsize(f"<{_SCALAR_FORMATS[kind]}") * count
        self._require(size)
        values = list(struct.unpack_from(f"<{count}{_SCALAR_FORMATS[kind]}", self._view, self._offset))
        self._offset += size
        return values

    def _read_strings(self, count: int) -> list[str]:
        self._require(count * _LENGTH.size)
        view, offset, unpack, values = self._view, self._offset, _LENGTH.unpack_from, []
        for _ in range(count):
            start = offset + 8
            offset = start + unpack(view, offset)[0]
            values.append(str(view[start:offset], "utf-8"))
        # A slice past the end is short, not an error, so one check after the loop covers every string.
        if offset > len(view):
            raise TokenizerLoadError("it ends inside a string")
        self._offset = offset
        return values

    def _require(self, size: int) -> None:
        if size > len(self._view) - self._offset:
            raise TokenizerLoadError("it ends inside an array")
