"""Fixtures of engines and trainers."""

from tests.support.generator_fixtures import finish, make_engine, make_model, run_async
from tests.support.trainer_fixtures import gpt2, llama, one_thread, qwen3, step_data, trainer_of

__all__ = [
    "finish",
    "gpt2",
    "llama",
    "make_engine",
    "make_model",
    "one_thread",
    "qwen3",
    "run_async",
    "step_data",
    "trainer_of",
]
