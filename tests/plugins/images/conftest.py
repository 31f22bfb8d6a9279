"""Fixtures of engines and trainers, and a small image-text model."""

from pathlib import Path

import pytest

from tests.support.generator_fixtures import (
    finish,
    make_engine,
    make_model,
    one_thread,
    request_of,
    run_async,
    samples_of,
)
from tests.support.image_text_models import make
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


@pytest.fixture(scope="session")
def idefics3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a model that reads pixels."""
    path = tmp_path_factory.mktemp("idefics3")
    make("idefics3").save_pretrained(path)
    return path
