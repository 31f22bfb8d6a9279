"""Fixtures of engines and trainers."""

from tests.support.generator_fixtures import (
    finish,
    make_engine,
    make_model,
    one_thread,
    request_of,
    run_async,
    samples_of,
)
from tests.support.trainer_fixtures import (
    gpt2,
    llama,
    qwen3,
    step_data,
    trainer_of,
)

__all__ = [
    "finish",
    "gpt2",
    "llama",
    "make_engine",
    "make_model",
    "one_thread",
    "qwen3",
    "request_of",
    "run_async",
    "samples_of",
    "step_data",
    "trainer_of",
]
