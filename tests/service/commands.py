"""Commands of the command line, run in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from service.cli import run

if TYPE_CHECKING:
    import pytest


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must fail with one line; returns the line."""
    assert run([*arguments]) != 0
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("radixd: ")
    return line
