"""Silences the log while virtual runs are played, because they log expected warnings."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import structlog

SILENT: Final = structlog.make_filtering_bound_logger(logging.CRITICAL)


@contextmanager
def quiet_log() -> Generator[None]:
    """Drop log lines below critical in the block."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=SILENT)
    try:
        yield
    finally:
        structlog.configure(**before)
