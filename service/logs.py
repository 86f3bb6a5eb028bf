"""Logging: one event a line on stderr, JSON for machines, columns for a terminal.

A log that cannot be written, because the disk is full or whoever read it is gone, costs its lines and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TextIO, cast

import structlog
import structlog.typing


def configure() -> structlog.typing.FilteringBoundLogger:
    """Sends this process's log, and what libraries log, to stderr; returns the service's logger."""
    # A process may be started without any.
    stream = _Lossy(sys.stderr or open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - it lives as long as the log
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if stream.isatty():
        rendered: list[structlog.typing.Processor] = [structlog.dev.ConsoleRenderer()]
    else:
        rendered = [structlog.processors.dict_tracebacks, lead_with_event, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", stream)),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return log


def lead_with_event(logger: object, method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Puts first what every line has, so that lines can be read below each other."""
    del logger, method
    leading = {key: line[key] for key in ("timestamp", "level", "event") if key in line}
    return {**leading, **line}


class _Lossy:
    """A text stream that loses what it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()
