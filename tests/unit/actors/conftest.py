"""Actors set the logging of their process up; here the process is that of the tests."""

import logging
from collections.abc import Iterator

import pytest
import structlog

from offbeat.telemetry.logs import LogOutputs


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Gives the process its own logging back, and closes the files of the actor's."""
    handlers, config = list(logging.getLogger().handlers), structlog.get_config()
    yield
    outputs = structlog.get_config()["logger_factory"]()
    if isinstance(outputs, LogOutputs):
        outputs.close()
    structlog.configure(**config)
    structlog.contextvars.clear_contextvars()
    logging.captureWarnings(capture=False)
    logging.getLogger().handlers = handlers
