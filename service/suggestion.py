"""What to type next, once a server runs."""

from __future__ import annotations

import ipaddress
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from service.server import join_address
from service.settings import DEFAULT_TARGET

if TYPE_CHECKING:
    from service.settings import Settings


def suggestion(settings: Settings, port: int) -> str:
    """A command to try next, as it can be typed where the user is."""
    called = Path(sys.argv[0])
    if shutil.which("radixd") or called.name != "radixd":
        called = Path("radixd")
    elif called.is_relative_to(Path.cwd()):
        called = called.relative_to(Path.cwd())
    address = join_address(_reachable(settings.host), port)
    target = [] if address == DEFAULT_TARGET else ["--target", address]
    # A script need not end by itself.
    limit = ["--max-tokens", "32"] if settings.script else []
    return f'{shlex.join([str(called), "generate", *target, *limit])} "Hello"'


def _reachable(host: str) -> str:
    """Where a server that listens on ``host`` is found from the same machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    loopback = {4: "127.0.0.1", 6: "::1"}
    return loopback[address.version] if address.is_unspecified else host
