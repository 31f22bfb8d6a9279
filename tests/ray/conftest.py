"""Starting the real command; every test here runs real actors."""

from pathlib import Path

import pytest

from tests.support import shared_ray
from tests.support.starting import Start, make_start

local_ray = shared_ray.local_ray


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.ray)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(trylast=True)  # after the fixtures of the test
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    shared_ray.leave_ray(item, nextitem)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Begin a run on Ray in a directory of its own."""
    return make_start(tmp_path_factory.mktemp("live"))
