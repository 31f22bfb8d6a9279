"""Starting the real command; every test here runs real actors."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.support.live_run import LiveRun

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).with_name("stub.yaml")
Start = Callable[..., LiveRun]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.ray)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Begin a run in a directory of its own: ``with start("name", recipe, "steps=3") as run``."""
    directory = tmp_path_factory.mktemp("live")

    def begin(
        name: str,
        recipe: Path | None,
        *overrides: str,
        command: str = "train",
        cwd: Path = directory,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> LiveRun:
        given = [] if recipe is None else [str(recipe), "wandb.mode=disabled"]
        return LiveRun(
            [command, *given, *overrides],
            run_dir=directory / name,
            cwd=cwd,
            environment=environment,
        )

    return begin
