"""The values that a command line may give: their types, and errors that name what gave a wrong one.

A value comes from a flag, a variable or the settings file, and whoever gave a wrong one must hear which of them it was.
Flags and variables are text, read here. A file's values already have TOML's types and must have the right one:
``port = true`` is a mistake and not port 1. Nothing of a file is used before all of it was checked.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from service.errors import StartError
from service.settings import read_file

if TYPE_CHECKING:
    from pathlib import Path

HUGE = 2**31 - 1
"""A bound that only keeps numbers in the range of the machine's; help does not show it."""

_FILE = f"{__name__}.file"
_SHOWN_CHARACTERS = 60


class Kind(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A type of value. ``read`` and ``check`` raise a ValueError that says what is wrong with the value."""

    name = "text"
    noun = "a string"
    file_types: tuple[type, ...] = (str,)
    allowed = ""
    """What help says of the values."""

    def read(self, text: str) -> Any:
        """The value that a flag or a variable spells."""
        return text

    def check(self, value: Any) -> Any:
        """The value itself, if it may be used."""
        return value

    def of_file(self, value: Any) -> Any:
        """The value that a settings file gives; never one of another type."""
        if type(value) not in self.file_types:
            raise ValueError(f"is not {self.noun}")
        return self.check(value)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click; defaults and a file's values, which were checked, come through as they are."""
        if not isinstance(value, str) or param is None or ctx is None:
            return value
        try:
            return self.check(self.read(value))
        except ValueError as error:
            raise click.UsageError(f"{given_as(ctx, param, value)}: {error}") from None


class Whole(Kind):
    """An integer from ``low`` to ``high``."""

    name = "integer"
    noun = "an integer"
    file_types = (int,)

    def __init__(self, low: int, high: int = HUGE) -> None:
        self.low, self.high = low, high
        self.allowed = f"From {low} to {high}." if high < HUGE else f"At least {low}." if high == HUGE else ""

    def read(self, text: str) -> int:
        """See Kind."""
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"is not {self.noun}") from None

    def check(self, value: int) -> int:
        """See Kind."""
        if not self.low <= value <= self.high:
            raise ValueError(f"must be between {self.low} and {self.high}")
        return value


class Number(Kind):
    """A number from ``low`` to ``high``."""

    name = "number"
    noun = "a number"
    file_types = (int, float)

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        self.allowed = f"From {low:g} to {high:g}."

    def read(self, text: str) -> float:
        """See Kind."""
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"is not {self.noun}") from None

    def check(self, value: float) -> float:
        """See Kind; NaN is outside every range."""
        if not self.low <= value <= self.high:
            raise ValueError(f"must be between {self.low:g} and {self.high:g}")
        return float(value)


class Text(Kind):
    """Text of ``low`` to ``high`` bytes."""

    def __init__(self, low: int = 1, high: int = HUGE) -> None:
        self.low, self.high = low, high

    def check(self, value: str) -> str:
        """See Kind; what is not UTF-8 reaches a program as lone surrogates."""
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise ValueError("is not UTF-8 text") from None
        if size < self.low:
            raise ValueError("must not be empty")
        if size > self.high:
            raise ValueError(f"must have at most {self.high} bytes")
        return value


class OneOf(Text):
    """One of a few words."""

    def __init__(self, *choices: str) -> None:
        super().__init__()
        self.choices = choices

    def check(self, value: str) -> str:
        """See Kind."""
        if value not in self.choices:
            raise ValueError(f"must be {' or '.join(self.choices)}")
        return value


class Policy(Text):
    """The name of an eviction policy. Their list is the cache's, which is loaded only for who needs it."""

    name = "policy"

    @property
    def choices(self) -> tuple[str, ...]:
        """All of them, the default first."""
        from kvcache import POLICIES  # noqa: PLC0415

        return POLICIES

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """See click, of which only newer versions give the context."""
        return f"[{'|'.join(self.choices)}]"

    def check(self, value: str) -> str:
        """See Kind."""
        if value not in self.choices:
            raise ValueError(f"must be {' or '.join(self.choices)}")
        return value


class Target(Text):
    """Where a server listens: ``host:port``."""

    _HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")

    def check(self, value: str) -> str:
        """See Kind."""
        if value:
            super().check(value)
        scheme, found, _ = value.partition("://")
        if found:
            raise ValueError(f"give host:port, without {scheme}://")
        match = self._HOST_PORT.fullmatch(value)
        if match is None or int(match["port"]) > 65535:
            raise ValueError("give host:port, such as 127.0.0.1:50051 or [::1]:50051")
        return value


class Switch(Kind, click.types.BoolParamType):
    """On or off: a flag without a value, ``true`` or ``false`` elsewhere."""

    noun = "true or false"
    file_types = (bool,)

    def read(self, text: str) -> bool:
        """See Kind."""
        lowered = text.strip().lower()
        if lowered not in {"true", "false", "1", "0", "yes", "no", "on", "off"}:
            raise ValueError(f"is not {self.noun}")
        return lowered in {"true", "1", "yes", "on"}


@dataclass(frozen=True, slots=True)
class _File:
    """The settings file as it was written: its own keys and values by the setting's name."""

    path: Path
    written: dict[str, tuple[str, Any]]


def load_file(context: click.Context, path: Path) -> None:
    """Makes a settings file's values the defaults of a command's options.

    Raises:
        UsageError: It cannot be read, or a value cannot be used; the message names the file and the key.
    """
    kinds = {p.name: p.type for p in context.command.params if isinstance(p.type, Kind)}
    try:
        written = read_file(path, kinds)
    except StartError as error:
        raise click.UsageError(str(error)) from None
    context.meta[_FILE] = _File(path, written)
    values = {}
    for name, (key, value) in written.items():
        kind = kinds[name]
        try:
            values[name] = kind.of_file(value)
        except ValueError as error:
            raise click.UsageError(f"{path}: {key} = {_as_toml(value)}: {error}") from None
    context.default_map = values


def given_as(context: click.Context, parameter: click.Parameter, value: object) -> str:
    """A value as whoever gave it wrote it: ``--port 1``, ``RADIXD_PORT=1`` or ``radixd.toml: port = 1``.

    Args:
        context: Of the command.
        parameter: What it is the value of.
        value: None for a flag that has none.
    """
    source = context.get_parameter_source(parameter.name or "")
    file = context.meta.get(_FILE)
    if source is ParameterSource.DEFAULT_MAP and file is not None:
        key, as_written = file.written[parameter.name]
        return f"{file.path}: {key} = {_as_toml(as_written)}"
    if source is ParameterSource.ENVIRONMENT:
        return str(parameter.envvar) if value is None else f"{parameter.envvar}={_as_word(value)}"
    name = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
    return name if value is None else f"{name} {_as_word(value)}"


def _as_word(value: object) -> str:
    text = str(value)
    plain = re.fullmatch(r"[^\s:'\"](\S*[^\s:'\"])?", text) is not None and text.isprintable()
    return _cut(text if plain else repr(text))


def _as_toml(value: object) -> str:
    if isinstance(value, bool | str):
        return _cut(json.dumps(value, ensure_ascii=False))
    return _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
