"""What an operator may set, in one frozen object.

The command line fills it: a flag wins over a variable (``RADIXD_*``), a variable over a TOML file, and the file over
the defaults here. A setting's flag, variable and file key have one name. What depends on two settings is checked here,
what depends on one in options.py.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from service.errors import SettingError, StartError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

SCRIPTED = "scripted:"
DEFAULT_TARGET = "127.0.0.1:50051"
DEVICES = ("auto", "cpu")


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
        eviction: What the radix cache evicts first, one of ``kvcache.POLICIES``.
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
    eviction: str = "hazard"
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
        """Raises SettingError for what cannot be served."""
        if self.device not in DEVICES:
            built = " or ".join(DEVICES)
            cuda = self.device.partition(":")[0] == "cuda"
            raise SettingError("device", self.device, f"not built yet; use {built}" if cuda else f"must be {built}")
        if self.engine == SCRIPTED:
            raise SettingError("engine", self.engine, f"names no file; give the script's, as in {SCRIPTED}FILE")
        if self.engine != "torch" and not self.script:
            raise SettingError("engine", self.engine, f"must be torch or {SCRIPTED}FILE")
        if self.pool_tokens is not None and self.pool_tokens < self.page_size:
            raise SettingError("pool_tokens", self.pool_tokens, f"must be at least one page ({self.page_size})")

    @property
    def script(self) -> str | None:
        """The script's path, if the engine is a scripted one."""
        return self.engine.removeprefix(SCRIPTED) if self.engine.startswith(SCRIPTED) else None


DEFAULTS = {field.name: field.default for field in fields(Settings)}
"""Each setting's default, by name."""


def read_file(path: Path, known: Collection[str]) -> dict[str, tuple[str, Any]]:
    """Reads settings from a TOML file whose keys are the flags' names, with dashes or underscores.

    Returns:
        Each key as it is written and its value, by the setting's name.

    Raises:
        StartError: It cannot be read, is no TOML, or has a key twice or one that is not in ``known``.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartError(f"{path}: is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise StartError(f"{path}: is not TOML: {error}") from None
    except RecursionError:
        raise StartError(f"{path}: is nested too deeply") from None
    values: dict[str, tuple[str, Any]] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in known:
            raise StartError(f"{path}: unknown setting {key!r}")
        if name in values:
            raise StartError(f"{path}: {values[name][0]} and {key} are the same setting")
        values[name] = (key, value)
    return values
