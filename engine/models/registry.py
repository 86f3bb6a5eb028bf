"""Finds the code for a model file by the architecture that the file names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.models.llama import LlamaModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from engine.models.base import Model
    from engine.weights.gguf import GGUFFile


def architectures() -> Mapping[str, Callable[[GGUFFile, torch.dtype], Model]]:
    """The architectures that can be loaded from GGUF, by the name that ``general.architecture`` gives them."""
    return {"llama": LlamaModel.from_gguf}


def load_model(file: GGUFFile, dtype: torch.dtype) -> Model:
    """Loads the model that a file holds.

    Args:
        file: The file.
        dtype: float32 or bfloat16, of weights, activations, keys and values.

    Raises:
        ModelLoadError: The architecture is not supported, or the file does not hold what the architecture needs, or
        more.
    """
    load = architectures().get(file.architecture)
    if load is None:
        known = ", ".join(sorted(architectures()))
        raise file.error(f"has architecture {file.architecture!r}, which is not supported (supported: {known})")
    model = load(file, dtype)
    file.require_all_read()
    return model
