"""Logging: one event a line on stderr, JSON for machines, columns for a terminal."""

from __future__ import annotations

import logging
import sys

import structlog
import structlog.typing


def configure() -> structlog.typing.FilteringBoundLogger:
    """Sends this process's log, and what libraries log, to stderr; returns the service's logger."""
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if sys.stderr.isatty():
        rendered: list[structlog.typing.Processor] = [structlog.dev.ConsoleRenderer()]
    else:
        rendered = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *rendered],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return log
