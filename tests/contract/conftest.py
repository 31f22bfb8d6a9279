"""The contracts are written beside the tests; real actors in this process give its logging back."""

import pytest

from tests.support import shared_ray
from tests.support.own_logging import own_logging

pytest.register_assert_rewrite(
    "trainer_bench",
    "trainer_contract",
    "generator_contract",
    "rollouts_contract",
    "stop_string_contract",
)


_own_logging = pytest.fixture(autouse=True)(own_logging)
local_ray = shared_ray.local_ray


@pytest.hookimpl(trylast=True)  # after the fixtures of the test
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    shared_ray.leave_ray(item, nextitem)
