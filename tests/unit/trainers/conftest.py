"""Fixtures of trainers."""

from tests.support.trainer_fixtures import (
    gpt2,
    llama,
    one_thread,
    qwen3,
    step_data,
    trainer_of,
)

__all__ = ["gpt2", "llama", "one_thread", "qwen3", "step_data", "trainer_of"]
