"""Actors set the logging of their process up; in a test that process is the tests' own."""

import logging
from collections.abc import Iterator

import structlog

from offbeat.telemetry.logs import JsonLinesLog


def own_logging() -> Iterator[None]:
    """Give it back afterwards."""
    handlers, config = list(logging.getLogger().handlers), structlog.get_config()
    yield
    outputs = structlog.get_config()["logger_factory"]()
    if isinstance(outputs, JsonLinesLog):
        outputs.close()
    structlog.configure(**config)
    structlog.contextvars.clear_contextvars()
    logging.captureWarnings(capture=False)
    logging.getLogger().handlers = handlers
