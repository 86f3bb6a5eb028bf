"""``radixd top``: looks at a running server again and again, and draws what it saw.

At a terminal the frames replace each other on a screen of their own, until Ctrl-C. Anywhere else one frame is printed
as plain text: no colours, no movement.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from service.dashboard import HEADER_LINES, Frame, draw
from service.terminal import on_screen, say

if TYPE_CHECKING:
    from service.client import Client

_LISTED = 20
_MAX_LISTED = 1000
_TEXT_BYTES = 400
"""Of each prefix: as much as the widest terminal shows of it."""


class Top:
    """Watches one server.

    Args:
        client: Asks it.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def run(self, interval: float, *, once: bool) -> int:
        """Watches until Ctrl-C, or looks once; returns the exit code.

        Raises:
            CallError: There is no server, or it went away.
        """
        console = Console()
        try:
            # The console alone would take FORCE_COLOR for a terminal, and a pipe would never end.
            if once or not on_screen() or not console.is_terminal or console.is_dumb_terminal:
                self._print()
            else:
                self._watch(console, interval)
        except KeyboardInterrupt:
            pass
        return 0

    def _print(self) -> None:
        console = Console(color_system=None, force_terminal=False)
        with console.capture() as captured:
            console.print(draw(self._look(_LISTED), None))
        say("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))

    def _watch(self, console: Console, interval: float) -> None:
        # The first look comes before the screen is taken, so that its failure is told on the user's own.
        frame, previous = self._look(_room(console)), None
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(draw(frame, previous), refresh=True)
                time.sleep(interval)
                frame, previous = self._look(_room(console)), frame

    def _look(self, limit: int) -> Frame:
        model = self._client.model().name
        stats, at = self._client.stats(), time.monotonic()
        return Frame(model, stats, self._client.prefixes(limit, _TEXT_BYTES), at)


def _room(console: Console) -> int:
    """How many prefixes the screen has lines for."""
    return min(max(console.height - HEADER_LINES, 1), _MAX_LISTED)
