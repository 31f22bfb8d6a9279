"""Starting the real command on each runtime: every test here shows what both of them promise.

A test with the marker ``only_ray`` is about a process that dies alone, which one process cannot show. One
with ``both_runtimes`` is about what each runtime has code of its own for. ``make test`` runs any other test
on the local runtime, ``make test-long`` on Ray as well: its fact is one of code that both share.
"""

from pathlib import Path

import pytest

from tests.support.starting import Start, make_start


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "runtime" not in metafunc.fixturenames:
        return
    is_marked = metafunc.definition.get_closest_marker
    on_ray = [pytest.mark.ray]
    if is_marked("only_ray") is None and is_marked("both_runtimes") is None:
        on_ray.append(pytest.mark.long)
    runtimes = [pytest.param("ray", marks=on_ray)]
    if is_marked("only_ray") is None:
        runtimes.append(pytest.param("local"))
    metafunc.parametrize("runtime", runtimes, indirect=True, scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="module")
def runtime(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def start(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Begin a run on this runtime in a directory of its own."""
    return make_start(tmp_path_factory.mktemp(f"live-{runtime}"), runtime, is_warm=True)
