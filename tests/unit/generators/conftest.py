"""Fixtures of engines."""

from tests.support.generator_fixtures import (
    finish,
    make_engine,
    make_model,
    one_thread,
    request_of,
    run_async,
    samples_of,
)

__all__ = [
    "finish",
    "make_engine",
    "make_model",
    "one_thread",
    "request_of",
    "run_async",
    "samples_of",
]
