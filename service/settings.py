"""What an operator may set, in one frozen object.

The command line fills it from flags, then the environment (``RADIXD_*``), then a TOML file, then the defaults here; a
setting's flag, variable and file key have one name. Ranges that click cannot express are checked here.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from service.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

SCRIPTED = "scripted:"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of ``radixd serve``.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        model: A known name, or the path of a model file.
        device: Where the model runs: "auto" or "cpu".
        engine: "torch", or "scripted:FILE" to play given tokens.
        cache: "radix", or "naive", which never finds anything.
        page_size: Tokens in a page of the cache.
        pool_tokens: Tokens in the whole page pool; None leaves it to the engine.
        context: Prompt and output together, in tokens; None is the model's own.
        max_running: Sequences that may run at once.
        max_waiting: Sequences that may wait at once; more are refused.
        chunk_tokens: Prompt tokens that one step computes at most.
        overlap: Launch a step before the one before it is collected.
        dtype: The type of activations and cache; "auto" leaves it to the engine.
        threads: Threads of the forward pass; None leaves it to the engine.
        max_message_mb: Largest message either way, in MiB.
        grace: Seconds that running streams have to finish after SIGTERM or SIGINT.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    model: str = "smollm2"
    device: str = "auto"
    engine: str = "torch"
    cache: str = "radix"
    page_size: int = 16
    pool_tokens: int | None = None
    context: int | None = None
    max_running: int = 64
    max_waiting: int = 1024
    chunk_tokens: int = 512
    overlap: bool = True
    dtype: str = "auto"
    threads: int | None = None
    max_message_mb: int = 64
    grace: float = 30.0

    def __post_init__(self) -> None:
        """Raises StartError for what cannot be served."""
        if self.device == "cuda":
            raise StartError("--device cuda: not built yet; use --device cpu")
        if self.engine != "torch" and not self.script:
            raise StartError(f"--engine {self.engine}: must be torch or scripted:FILE")
        if self.pool_tokens is not None and self.pool_tokens < self.page_size:
            raise StartError(f"--pool-tokens {self.pool_tokens}: must be at least one page ({self.page_size})")

    @property
    def script(self) -> str | None:
        """The script's path, if the engine is a scripted one."""
        return self.engine.removeprefix(SCRIPTED) if self.engine.startswith(SCRIPTED) else None


DEFAULTS = {field.name: field.default for field in fields(Settings)}
"""Each setting's default, by name."""


def read_file(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Reads settings from a TOML file whose keys are the flags' names, with dashes or underscores.

    Raises:
        StartError: It cannot be read, is no TOML, or has a key that is not in ``known``.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise StartError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartError(f"--config {path}: {error}") from None
    values = {key.replace("-", "_"): value for key, value in content.items()}
    for name in values:
        if name not in known:
            raise StartError(f"--config {path}: unknown setting {name.replace('_', '-')!r}")
    return values
