"""The contracts are written beside the tests; real actors in this process give its logging back."""

from collections.abc import Iterator

import pytest
import ray

from tests.support.own_logging import own_logging

pytest.register_assert_rewrite(
    "trainer_bench",
    "trainer_contract",
    "generator_contract",
    "rollouts_contract",
    "stop_string_contract",
)


_own_logging = pytest.fixture(autouse=True)(own_logging)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray of its own for the tests of one file."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=1)
    yield
    ray.shutdown()
