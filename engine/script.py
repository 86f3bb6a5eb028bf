"""The script that a scripted engine plays: a JSON file, described in docs/testing.md."""

from __future__ import annotations

import json
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
    except ValueError as error:
        raise ModelLoadError(f"the script {path} is not JSON: {error}") from error
    try:
        return parse_script(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"the script {path} is wrong: {error}") from error


def parse_script(data: dict[str, Any]) -> Script:
    """Checks a script that was read from JSON.

    Raises:
        TypeError, ValueError: Something is not as docs/testing.md says.
    """
    if not isinstance(data, dict):
        raise TypeError("it must be an object")
    _refuse_unknown(data, _TOP_KEYS, "the script")
    pieces, special_ids = _vocabulary(data.get("vocabulary"))
    default_vocabulary = "vocabulary" not in data
    size = len(pieces)
    eos = data.get("eos", [257] if default_vocabulary else [])
    eos_ids = frozenset(_token_id(i, size) for i in eos)
    bos = data.get("bos")
    requests = {name: _part(name, part, size) for name, part in data.get("requests", {}).items()}
    for name, part in requests.items():
        if part.tokens and not part.loop and not eos_ids:
            raise ValueError(f'request {name!r}: "tokens" needs an "eos" id to end with, or "loop"')
    return Script(
        name=str(data.get("name", "scripted")),
        pieces=pieces,
        special_ids=special_ids,
        bos_id=None if bos is None else _token_id(bos, size),
        eos_ids=eos_ids,
        chat_template=data.get("chat_template"),
        context=_at_least(1, data.get("context", 8192), "context"),
        step_ms=float(data.get("step_ms", 0)),
        token_us=float(data.get("token_us", 0)),
        hang_at=data.get("hang_at"),
        fail_at=data.get("fail_at"),
        requests=requests,
    )


def _vocabulary(entries: list[Any] | None) -> tuple[tuple[bytes, ...], frozenset[int]]:
    if entries is None:
        entries = [{"hex": f"{byte:02x}"} for byte in range(256)] + [{"special": "<bos>"}, {"special": "<eos>"}]
    pieces, special = [], set()
    for i, entry in enumerate(entries):
        match entry:
            case str():
                pieces.append(entry.encode())
            case {"hex": str(digits)}:
                pieces.append(bytes.fromhex(digits))
            case {"special": str(text)}:
                pieces.append(text.encode())
                special.add(i)
            case _:
                raise ValueError(f'vocabulary[{i}] must be a string, {{"hex": ...}} or {{"special": ...}}')
    if not pieces:
        raise ValueError("the vocabulary is empty")
    return tuple(pieces), frozenset(special)


def _part(name: str, data: dict[str, Any], size: int) -> Part:
    _refuse_unknown(data, _PART_KEYS, f"request {name!r}")
    tokens = data.get("tokens", [])
    if "tokens" in data and "logits" in data:
        raise ValueError(f'request {name!r} has both "tokens" and "logits"')
    lists = tokens if tokens and isinstance(tokens[0], list) else [tokens] if tokens else []
    return Part(
        tokens=tuple(tuple(_token_id(i, size) for i in ids) for ids in lists),
        logits=_logits(data["logits"], size) if "logits" in data else None,
        loop=bool(data.get("loop", False)),
        step_ms=float(data.get("step_ms", 0)),
        hang_at=data.get("hang_at"),
        fail_at=data.get("fail_at"),
        nan_at=data.get("nan_at"),
    )


def _logits(rows: list[list[float]], size: int) -> Float32Array:
    # Ids that a row does not reach are never sampled.
    logits = np.full((len(rows), size), -np.inf, dtype=np.float32)
    for i, row in enumerate(rows):
        if not 0 < len(row) <= size:
            raise ValueError(f"logits[{i}] has {len(row)} entries for a vocabulary of {size}")
        logits[i, : len(row)] = row
    return logits


def _token_id(value: Any, size: int) -> int:
    if not isinstance(value, int) or not 0 <= value < size:
        raise ValueError(f"{value!r} is no token id of a vocabulary of {size}")
    return value


def _at_least(least: int, value: Any, name: str) -> int:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    return value


def _refuse_unknown(data: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(f"{where} has unknown keys: {', '.join(unknown)}")
