"""The contracts are written beside the tests; real actors in this process give its logging back."""

import logging
from collections.abc import Iterator

import pytest
import ray
import structlog

from offbeat.telemetry.logs import LogOutputs

pytest.register_assert_rewrite(
    "trainer_bench", "trainer_contract", "generator_contract", "rollouts_contract"
)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Actors set the logging of their process up; here the process is that of the tests."""
    handlers, config = list(logging.getLogger().handlers), structlog.get_config()
    yield
    outputs = structlog.get_config()["logger_factory"]()
    if isinstance(outputs, LogOutputs):
        outputs.close()
    structlog.configure(**config)
    structlog.contextvars.clear_contextvars()
    logging.captureWarnings(capture=False)
    logging.getLogger().handlers = handlers


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray of its own for the tests of one file."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=1)
    yield
    ray.shutdown()
