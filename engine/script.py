"""The script that a scripted engine plays: a JSON file, described in docs/testing.md."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.base import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from engine.base import Float32Array

_FAULT_KEYS = {"step_ms", "hang_at", "fail_at"}
_TOP_KEYS = _FAULT_KEYS | {"name", "vocabulary", "bos", "eos", "chat_template", "context", "token_us", "requests"}
_PART_KEYS = _FAULT_KEYS | {"tokens", "logits", "loop", "nan_at"}
_DAY_MS = 86_400_000
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4e38
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Part:
    """What one request does. Positions count a continuation's output tokens from 0.

    Attributes:
        tokens: For each index, the ids it generates; the last list serves further indices. Empty: not given.
        logits: float32[rows, vocab] to sample from, one row for each position, the last row again and again.
        loop: Start the tokens again when they are used up, instead of ending with an end-of-sequence id.
        step_ms: Added to each step the request is part of.
        hang_at: The step that computes this position never ends.
        fail_at: The step that computes this position raises.
        nan_at: At this position the request's numbers are not finite.
    """

    tokens: tuple[tuple[int, ...], ...] = ()
    logits: Float32Array | None = None
    loop: bool = False
    step_ms: float = 0.0
    hang_at: int | None = None
    fail_at: int | None = None
    nan_at: int | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """A whole script.

    Attributes:
        name: The model's name.
        pieces: Each token's bytes, by id.
        special_ids: Ids that are control tokens.
        bos_id: Begin-of-sequence id, if there is one.
        eos_ids: End-of-sequence ids.
        chat_template: Jinja source, if there is one.
        context: Prompt and output together, in tokens.
        step_ms: How long each step takes.
        token_us: Added for each token that a step computes.
        hang_at: The step, counted from 1, that never ends.
        fail_at: The step that raises.
        requests: By request id or shell pattern.
    """

    name: str
    pieces: tuple[bytes, ...]
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: frozenset[int]
    chat_template: str | None
    context: int
    step_ms: float = 0.0
    token_us: float = 0.0
    hang_at: int | None = None
    fail_at: int | None = None
    requests: Mapping[str, Part] = field(default_factory=dict)

    def part(self, request_id: str) -> Part | None:
        """The part of a request: its own id first, then the first pattern that matches."""
        exact = self.requests.get(request_id)
        if exact is not None:
            return exact
        return next((part for pattern, part in self.requests.items() if fnmatchcase(request_id, pattern)), None)


def read_script(path: Path) -> Script:
    """Reads and checks a script.

    Raises:
        ModelLoadError: The file cannot be read, or something in it is not as docs/testing.md says.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"cannot read the script {path}: {error.strerror}") from error
    except RecursionError as error:
        raise ModelLoadError(f"the script {path} is nested too deeply") from error
    except ValueError as error:
        raise ModelLoadError(f"the script {path} is not JSON: {error}") from error
    try:
        return parse_script(data)
    except ValueError as error:
        raise ModelLoadError(f"the script {path} is wrong: {error}") from error


def parse_script(data: object) -> Script:
    """Checks a script that was read from JSON.

    Raises:
        ValueError: Something is not as docs/testing.md says.
    """
    script = _Fields(data, "", _TOP_KEYS)
    pieces, special_ids = _vocabulary(script.items("vocabulary"))
    size = len(pieces)
    eos = script.items("eos")
    if eos is None:
        eos = [] if script.has("vocabulary") else [257]
    eos_ids = frozenset(_token_id(i, size, f"eos[{n}]") for n, i in enumerate(eos))
    requests = {name: _part(name, part, size) for name, part in script.entries("requests").items()}
    for name, part in requests.items():
        if part.tokens and not part.loop and not eos_ids:
            raise ValueError(f'request {name!r}: "tokens" needs an "eos" id to end with, or "loop"')
    return Script(
        name=script.text("name") or "scripted",
        pieces=pieces,
        special_ids=special_ids,
        bos_id=script.whole("bos", high=size - 1),
        eos_ids=eos_ids,
        chat_template=script.text("chat_template"),
        context=script.whole("context", low=1, high=_INT32_MAX) or 8192,
        step_ms=script.number("step_ms"),
        token_us=script.number("token_us"),
        hang_at=script.whole("hang_at", low=1),
        fail_at=script.whole("fail_at", low=1),
        requests=requests,
    )


class _Fields:
    """An object of the script, whose values are taken out by the type they must have; absent ones are None, or 0.

    Args:
        value: What JSON gave.
        where: What it is, for messages; empty for the script itself.
        known: The keys it may have.
    """

    def __init__(self, value: object, where: str, known: set[str]) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{where or 'it'} must be an object, not {_shown(value)}")
        self._values = value
        self._prefix = f"{where}: " if where else ""
        unknown = sorted(set(value) - known)
        if unknown:
            raise ValueError(f"{self._prefix}unknown keys: {', '.join(map(repr, unknown))}")

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return key in self._values

    def whole(self, key: str, *, low: int = 0, high: int | None = None) -> int | None:
        """An integer."""
        value = self._values.get(key)
        if not self.has(key):
            return None
        if type(value) is not int or value < low or (high is not None and value > high):
            limits = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise self._wrong(key, f"an integer {limits}")
        return value

    def number(self, key: str) -> float:
        """A time; 0 where absent."""
        value = self._values.get(key, 0)
        if type(value) not in (int, float) or not 0 <= value <= _DAY_MS:
            raise self._wrong(key, f"a number from 0 to {_DAY_MS}")
        return float(value)

    def text(self, key: str) -> str | None:
        """A string that is not empty."""
        value = self._values.get(key)
        if not self.has(key):
            return None
        if not isinstance(value, str) or not value or not _is_unicode(value):
            raise self._wrong(key, "a string of at least one character")
        return value

    def flag(self, key: str) -> bool:
        """True or false; false where absent."""
        value = self._values.get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def items(self, key: str) -> list[Any] | None:
        """A list."""
        value = self._values.get(key)
        if self.has(key) and not isinstance(value, list):
            raise self._wrong(key, "a list")
        return value

    def entries(self, key: str) -> dict[str, Any]:
        """An object with keys of any name."""
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return value

    def _wrong(self, key: str, expected: str) -> ValueError:
        return ValueError(f"{self._prefix}{key} must be {expected}, not {_shown(self._values[key])}")


def _vocabulary(entries: list[Any] | None) -> tuple[tuple[bytes, ...], frozenset[int]]:
    if entries is None:
        entries = [{"hex": f"{byte:02x}"} for byte in range(256)] + [{"special": "<bos>"}, {"special": "<eos>"}]
    pieces, special = [], set()
    for i, entry in enumerate(entries):
        match entry:
            case str(text) if _is_unicode(text):
                pieces.append(text.encode())
            case {"hex": str(digits), **others} if not others and re.fullmatch(r"([0-9a-fA-F]{2})*", digits):
                pieces.append(bytes.fromhex(digits))
            case {"special": str(text), **others} if not others and _is_unicode(text):
                pieces.append(text.encode())
                special.add(i)
            case _:
                raise ValueError(
                    f'vocabulary[{i}] must be a string, {{"hex": ...}} or {{"special": ...}}, not {_shown(entry)}'
                )
    if not pieces:
        raise ValueError("the vocabulary is empty")
    return tuple(pieces), frozenset(special)


def _part(name: str, data: object, size: int) -> Part:
    where = f"request {name!r}"
    part = _Fields(data, where, _PART_KEYS)
    tokens, logits, loop = part.items("tokens"), part.items("logits"), part.flag("loop")
    if tokens is not None and logits is not None:
        raise ValueError(f'{where} has both "tokens" and "logits"')
    lists = [] if tokens is None else tokens if any(isinstance(i, list) for i in tokens) else [tokens]
    for i, ids in enumerate(lists):
        if not isinstance(ids, list) or (loop and not ids):
            raise ValueError(f"{where}: tokens[{i}] must be a list {'of ids to repeat' if loop else 'like the others'}")
    return Part(
        tokens=tuple(tuple(_token_id(i, size, f"{where}: tokens") for i in ids) for ids in lists),
        logits=None if logits is None else _logits(logits, size, where),
        loop=loop,
        step_ms=part.number("step_ms"),
        hang_at=part.whole("hang_at"),
        fail_at=part.whole("fail_at"),
        nan_at=part.whole("nan_at"),
    )


def _logits(rows: list[Any], size: int, where: str) -> Float32Array:
    if not rows:
        raise ValueError(f"{where}: logits must have at least one row")
    # Ids that a row does not reach are never sampled.
    logits = np.full((len(rows), size), -np.inf, dtype=np.float32)
    for i, row in enumerate(rows):
        if not isinstance(row, list) or not 0 < len(row) <= size:
            raise ValueError(f"{where}: logits[{i}] must be a list of 1 to {size} numbers, not {_shown(row)}")
        for j, value in enumerate(row):
            if type(value) not in (int, float) or (abs(value) > _FLOAT32_MAX and abs(value) != np.inf):
                raise ValueError(f"{where}: logits[{i}][{j}] must be a number, not {_shown(value)}")
        logits[i, : len(row)] = row
    return logits


def _token_id(value: object, size: int, where: str) -> int:
    if type(value) is not int or not 0 <= value < size:
        raise ValueError(f"{where}: {_shown(value)} is no token id of a vocabulary of {size}")
    return value


def _is_unicode(text: str) -> bool:
    """JSON may spell half of a surrogate pair, which is no character."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _shown(value: object) -> str:
    """A value as the file spells it, or its beginning."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
