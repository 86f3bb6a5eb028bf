"""Standard input and output of the terminal commands, whatever bytes come and wherever they go.

Text in is UTF-8 whatever the locale says; text out may go to a terminal that cannot show it, to a full disk or to a
reader that left. None of that may end in a traceback.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

import click

from service.errors import StartError


class InputError(StartError):
    """What was read cannot be used."""


def prepare_output() -> None:
    """Makes characters that the terminal's encoding lacks appear as question marks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def finish_output() -> None:
    """Writes out what is buffered; if that fails, drops it, so that the interpreter does not try again."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def say(text: str) -> None:
    """Writes a piece of output at once."""
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def on_screen() -> bool:
    """Whether a person sees the output."""
    return sys.stdout is not None and sys.stdout.isatty()


def read_all() -> str:
    """All of standard input.

    Raises:
        InputError: It cannot be read, or is not UTF-8.
    """
    if sys.stdin is None:
        raise InputError("standard input is closed")
    try:
        return sys.stdin.buffer.read().decode()
    except OSError as error:
        raise InputError(f"standard input cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text (byte {error.start})") from None


def at_keyboard() -> bool:
    """Whether a person types the input."""
    return sys.stdin is not None and sys.stdin.isatty()


def enable_editing() -> None:
    """Lets the person edit a line, and go back to earlier ones."""
    # Imported for its effect on input(); not every build of Python has it.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415


def read_line(prompt: str) -> str | None:
    """The next line; None at the end of the input, or if the person leaves with Ctrl-C.

    Args:
        prompt: Shown where a person types.

    Raises:
        InputError: The line is not UTF-8; or the input cannot be read, and then its end follows.
    """
    if sys.stdin is None:
        return None
    try:
        line = _read_line(prompt)
        if line is not None:
            line.encode()
    except KeyboardInterrupt:
        line = None
    except UnicodeError:
        raise InputError("the line is not UTF-8 text and was not sent") from None
    if line is None and at_keyboard():
        click.echo(err=True)
    return line


def _read_line(prompt: str) -> str | None:
    if at_keyboard() and on_screen():
        try:
            return input(prompt)
        except EOFError:
            return None
    if at_keyboard():
        click.echo(prompt, nl=False, err=True)
    try:
        line = sys.stdin.buffer.readline()
    except OSError:
        return None
    return line.decode().rstrip("\r\n") if line else None
