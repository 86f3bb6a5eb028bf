"""A GGUF file: typed metadata, and tensors dequantized into torch.

The file is memory-mapped; a tensor is read when it is asked for. Whatever is wrong with a file is a ``ModelLoadError``
of one line that names the file and the key or tensor. Nothing is guessed: a tensor has to have the shape that its
reader expects, and ``require_all_read`` refuses a file that holds tensors nobody asked for, because a model that leaves
out a bias or a scale gives wrong numbers and no error.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.quants import dequantize

from engine.base import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt
    from gguf.gguf_reader import ReaderTensor

_T = TypeVar("_T", str, int, float, bool)

_Order = Literal["I", "S", "<"]

_SUPPORTED = frozenset(
    (
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q2_K,
        GGMLQuantizationType.Q3_K,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q5_K,
        GGMLQuantizationType.Q6_K,
    )
)

_STRINGS = frozenset((GGUFValueType.STRING,))
_INTEGERS = frozenset(
    (
        GGUFValueType.UINT8,
        GGUFValueType.INT8,
        GGUFValueType.UINT16,
        GGUFValueType.INT16,
        GGUFValueType.UINT32,
        GGUFValueType.INT32,
        GGUFValueType.UINT64,
        GGUFValueType.INT64,
    )
)
_FLOATS = frozenset((GGUFValueType.FLOAT32, GGUFValueType.FLOAT64))


class GGUFFile:
    """An open GGUF file.

    Args:
        path: The file.

    Raises:
        ModelLoadError: There is no such file, it is not GGUF, or it ends before its last tensor does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror or error}") from error
        if magic != b"GGUF":
            raise self.error("is not a GGUF file")
        try:
            self._reader = _BoundedReader(path)
        except Exception as error:  # the reader indexes and reshapes unchecked: what it raises varies with the damage
            raise self.error(f"is truncated or damaged ({error})") from error
        if self._reader.byte_order != "I":
            raise self.error("has the other byte order than this machine")
        self._tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        self._unread = set(self._tensors)

    def error(self, what: str) -> ModelLoadError:
        """An error about this file: ``what`` goes after the file's path."""
        return ModelLoadError(f"{self.path}: {what}")

    @property
    def architecture(self) -> str:
        """The value of ``general.architecture``; the prefix of the architecture's own keys."""
        return self.string("general.architecture")

    def has(self, key: str) -> bool:
        """Whether the metadata has ``key``."""
        return key in self._reader.fields

    def string(self, key: str, default: str | None = None) -> str:
        """The string under ``key``, or ``default`` where it is absent and a default is given."""
        return self._scalar(key, _STRINGS, str, default)

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer under ``key``, of any width; otherwise as ``string``."""
        return self._scalar(key, _INTEGERS, int, default)

    def number(self, key: str, default: float | None = None) -> float:
        """The float or integer under ``key``; otherwise as ``string``."""
        return self._scalar(key, _FLOATS | _INTEGERS, float, default)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """The boolean under ``key``; otherwise as ``string``."""
        return self._scalar(key, frozenset((GGUFValueType.BOOL,)), bool, default)

    def strings(self, key: str) -> list[str]:
        """The array of strings under ``key``."""
        return [str(value) for value in self._array(key, _STRINGS)]

    def integers(self, key: str) -> list[int]:
        """The array of integers under ``key``."""
        return [int(value) for value in self._array(key, _INTEGERS)]

    def numbers(self, key: str) -> list[float]:
        """The array of floats under ``key``."""
        return [float(value) for value in self._array(key, _FLOATS)]

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor of that name."""
        return name in self._tensors

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Reads and dequantizes a tensor into memory of its own.

        Args:
            name: Its name in the file.
            shape: The shape that it must have, outermost dimension first: [out, in] for a matrix.
            dtype: float32 or bfloat16.

        Raises:
            ModelLoadError: It is missing, has another shape, or is of a type that is not supported.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self.error(f"tensor {name} is missing")
        self._unread.discard(name)
        found = tuple(int(n) for n in reversed(tensor.shape))
        if found != shape:
            raise self.error(f"tensor {name} has shape {list(found)}, not {list(shape)}")
        if tensor.tensor_type not in _SUPPORTED:
            raise self.error(f"tensor {name} is of type {tensor.tensor_type.name}, which is not supported")
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32, order="C").reshape(shape)
        return torch.from_numpy(values).to(dtype)

    def require_all_read(self) -> None:
        """Refuses the file if it holds tensors that were never read.

        Raises:
            ModelLoadError: It does; the message names up to three.
        """
        if self._unread:
            names = sorted(self._unread)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise self.error(
                f"holds tensors that a {self.architecture} model does not use: {', '.join(names[:3])}{more}"
            )

    def _scalar(self, key: str, types: frozenset[GGUFValueType], cast: type[_T], default: _T | None) -> _T:
        field = self._reader.fields.get(key)
        if field is None:
            if default is None:
                raise self.error(f"key {key} is missing")
            return default
        if field.types[0] not in types:
            raise self.error(f"key {key} is of type {field.types[0].name}, not {cast.__name__}")
        return cast(self._contents(key))

    def _array(self, key: str, types: frozenset[GGUFValueType]) -> list[Any]:
        field = self._reader.fields.get(key)
        if field is None:
            raise self.error(f"key {key} is missing")
        # An empty array has no element type that the reader would keep.
        if field.types[0] != GGUFValueType.ARRAY or (len(field.types) > 1 and field.types[1] not in types):
            raise self.error(f"key {key} is of type {'/'.join(t.name for t in field.types)}")
        contents: list[Any] = self._contents(key)
        return contents

    def _contents(self, key: str) -> Any:
        try:
            return self._reader.fields[key].contents()
        except (ValueError, IndexError) as error:
            raise self.error(f"key {key} cannot be read ({error})") from error


class _BoundedReader(GGUFReader):
    """Raises at the end of the file, where its base goes on with empty arrays, and opens four times as fast.

    Slicing a memmap costs microseconds, and a vocabulary takes some 200,000 slices; a view of its buffer does not.
    """

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: _Order | None = None) -> Any:
        order: _Order = self.byte_order if override_order is None else override_order
        element = np.dtype(dtype)
        if order != "I":
            element = element.newbyteorder(order)
        if count == 0:
            return np.empty(0, element)
        return np.frombuffer(self.data, element, int(count), int(offset))
