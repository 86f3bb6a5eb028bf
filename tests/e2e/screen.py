"""A command at a terminal of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import termios
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.e2e.process import RADIXD

if TYPE_CHECKING:
    from collections.abc import Iterator


class Screen:
    """A terminal that a process believes in."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = b""

    def type(self, keys: bytes) -> None:
        """Presses keys."""
        os.write(self._descriptor, keys)

    def until(self, text: bytes) -> bytes:
        """Reads up to and including a text."""
        while text not in self._unread:
            self._unread += os.read(self._descriptor, 1024)
        before, _, self._unread = self._unread.partition(text)
        return before + text


@contextmanager
def at_terminal(
    *arguments: str, lines: int = 24, columns: int = 80
) -> Iterator[tuple[subprocess.Popen[bytes], Screen]]:
    """Runs ``radixd`` at a terminal of this size."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (lines, columns))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    with subprocess.Popen(
        [RADIXD, *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment | {"TERM": "xterm"},
    ) as process:  # fmt: skip
        os.close(theirs)
        try:
            yield process, Screen(ours)
        finally:
            process.kill()
            os.close(ours)
