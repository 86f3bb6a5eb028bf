"""Serves a model like ``radixd serve``, with a 1 ms timer on the event loop that records how late it is.

Started by ``benchmarks/serve.py`` with the model as its argument. Prints its address once it serves, and when it is
told to stop a JSON list of [monotonic time, lateness] in seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

from service.logs import configure
from service.replica import build_replica
from service.server import Server, join_address
from service.settings import Settings

PERIOD = 0.001


async def probe(samples: list[tuple[float, float]]) -> None:
    """Sleeps again and again, and records by how much longer than it asked to."""
    while True:
        due = time.monotonic() + PERIOD
        await asyncio.sleep(PERIOD)
        now = time.monotonic()
        samples.append((now, now - due))


def main() -> None:
    """Serves until SIGTERM."""
    settings = Settings(port=0, model=sys.argv[1])
    replica = build_replica(settings)
    samples: list[tuple[float, float]] = []

    async def live() -> None:
        probing = asyncio.create_task(probe(samples))
        server = Server(replica, settings, configure())
        await server.serve(lambda port: print(f"probed on {join_address(settings.host, port)};", flush=True))
        probing.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(live())
    print(json.dumps(samples))


if __name__ == "__main__":
    main()
